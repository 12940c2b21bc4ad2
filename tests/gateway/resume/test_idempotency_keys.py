"""Calls that are repeated with the same Idempotency-Key."""

import pytest

from shared.bus.memory import MemoryBus
from shared.messages.requests import Abort
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.resume.played_streams import Played, post, shown, two_gateways


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_a_repeated_call_joins_the_first_from_its_beginning(
    make_stage: MakeStage, first: bool, second: bool
) -> None:
    stage, other = await two_gateways(make_stage)
    tokens = stage.tokenizer.encode("only once", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    one = await post(stage, temperature=1.0, stream=first)
    two = await post(other, temperature=1.0, stream=second)
    assert len(played.known) == 1
    for response, streams in ((one, first), (two, second)):
        if streams:
            datas = [block.removeprefix("data: ") for block in response.text.split("\n\n")[:-1]]
            assert (shown(datas)[0][0], datas[-1]) == ("only once", "[DONE]")
        else:
            assert response.json()["choices"][0]["text"] == "only once"
    assert one.headers["x-request-id"] == two.headers["x-request-id"]


async def test_a_key_stands_for_one_body_of_one_client(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    assert (await post(stage)).status_code == 200
    other = await post(stage, max_tokens=3)
    assert other.status_code == 422
    assert "Idempotency-Key" in other.json()["error"]["message"]
    assert (await post(stage, n=2)).status_code == 422
    assert (await post(stage, n=2, stream=True)).status_code == 422
    assert not any(isinstance(message, Abort) for message in stage.engine.received)
    headers = {"Authorization": "Bearer another"}
    assert (await post(stage, max_tokens=3, headers=headers)).status_code == 200
    assert (await post(stage, key="another", max_tokens=3)).status_code == 200
    assert len(played.known) == 3


async def test_another_body_does_not_disturb_the_call_that_has_the_key(stage: Stage) -> None:
    engine = stage.engine
    waiting = stage.spawn(post(stage))
    submit = await engine.accept_attach(await engine.read_attach(), [], ended={})
    assert (await post(stage, max_tokens=3)).status_code == 422
    await engine.generate(submit, stage.tokenizer.encode("ab", add_special_tokens=False))
    assert (await waiting).json()["choices"][0]["text"] == "ab"


async def test_a_client_that_leaves_does_not_end_what_another_call_delivers(stage: Stage) -> None:
    engine = stage.engine
    first = stage.spawn(post(stage))
    await engine.accept_attach(await engine.read_attach(), [], ended={})
    second = stage.spawn(post(stage))
    attach = await engine.read_attach()
    assert (await first).status_code == 409
    submit = await engine.accept_attach(attach, [], ended={})
    await engine.generate(submit, stage.tokenizer.encode("ab", add_special_tokens=False))
    assert (await second).json()["choices"][0]["text"] == "ab"
    assert not any(isinstance(message, Abort) for message in engine.received)


async def test_an_engine_that_does_not_answer_a_repeated_call_is_a_503(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(bus=MemoryBus(lambda: 1_000), bus_patience=0.2)
    response = await post(stage)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    attach = await stage.engine.read_attach()
    assert (await stage.engine.read_abort()).attachment == attach.attachment


async def test_a_client_that_leaves_before_a_repeated_call_is_answered_aborts_it(
    stage: Stage,
) -> None:
    leaving = stage.spawn(post(stage))
    attach = await stage.engine.read_attach()
    leaving.cancel()
    assert (await stage.engine.read_abort()).attachment == attach.attachment
    await stage.until(lambda: stage.model.engine.num_open == 0)


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_cannot_be_used_is_a_400(stage: Stage, key: str) -> None:
    response = await post(stage, key=key)
    assert response.status_code == 400
    assert "Idempotency-Key" in response.json()["error"]["message"]


async def test_only_streams_can_be_resumable(stage: Stage) -> None:
    response = await stage.complete(stream_resume=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_resume"
