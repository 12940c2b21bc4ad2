"""What happens to a request when the engine, the client or the gateway goes away."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence

import pytest
from openai import APIError

from gateway.engine.engine_status import EngineAway
from shared.bus.api import Entry
from shared.bus.memory import MemoryBus
from shared.messages.endings import EndFlag
from shared.messages.leases import ModelInfo
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.event_streams import Stream, finish, tokens_of
from tests.gateway.fake_engine import scores

# ------------------------------------------------------------------ the engine


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "starting", "detail": "loading weights"}, "loading weights"),
        ({"state": "failed", "detail": "ALiBi is not served"}, "ALiBi"),
        ({"model": None}, "ready"),
        ({"model": ModelInfo("other", 8, 8, "float32", ())}, "'other'"),
    ],
)
async def test_an_engine_that_cannot_serve_is_a_503_with_the_reason(
    make_stage: MakeStage, changes: Mapping[str, object], expected: str
) -> None:
    stage = await make_stage(ready=False)
    await stage.engine.publish(**changes)
    service = stage.server.service
    await stage.until(lambda: expected in str(service.why_not_ready()))
    for response in (await stage.complete(), await stage.chat()):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert expected in response.json()["error"]["message"]
    ready = await stage.http.get("/health/ready")
    assert ready.status_code == 503
    assert expected in ready.json()["detail"]
    assert (await stage.http.get("/health/live")).status_code == 200


async def test_an_engine_whose_lease_ran_out_is_a_503(make_stage: MakeStage) -> None:
    clock = [1_000_000]
    stage = await make_stage(bus=MemoryBus(lambda: clock[0]))
    assert (await stage.http.get("/health/ready")).status_code == 200
    clock[0] += 10_000_000
    await stage.until(lambda: stage.server.service.why_not_ready() is not None)
    assert (await stage.complete()).status_code == 503


async def test_an_open_stream_survives_a_new_epoch(stage: Stage) -> None:
    engine = stage.engine
    tokens = tokens_of(stage, "abcdef")
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        await engine.generate(submit, tokens[:2], flag=None)
        await stream.read_text(2)
        await engine.publish(state="starting")
        await engine.start_epoch()
        await engine.accept(submit, tokens[:2])
        await engine.generate(submit, tokens[2:])
        *chunks, done = await stream.rest()
    assert done == "[DONE]"
    text = stream.text + "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert text == "abcdef"


async def test_a_failed_request_ends_its_stream_with_an_error_and_no_done(stage: Stage) -> None:
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        await stage.engine.end(submit, "error", "the worker ran out of luck")
        [last] = await stream.rest()
    assert json.loads(last)["error"]["message"] == "the worker ran out of luck"
    stage.answer_text("Hi")
    await stage.complete()
    assert [type(message).__name__ for message in stage.engine.received] == [
        "Submit",
        "Submit",
    ]


async def test_the_official_client_raises_on_a_failed_stream(stage: Stage) -> None:
    opening = stage.spawn(stage.openai.completions.create(model="demo", prompt="Hi", stream=True))
    submit = await stage.engine.accept_next()
    stream = await opening
    await stage.engine.end(submit, "error", "out of luck")
    with pytest.raises(APIError, match="out of luck"):
        async for _ in stream:
            pass


async def test_a_failed_whole_answer_is_a_500(stage: Stage) -> None:
    waiting = stage.spawn(stage.chat())
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
    await stage.engine.end(submit, "error", "out of luck")
    response = await waiting
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of luck"


async def test_a_request_that_is_aborted_while_a_client_waits_continues(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
    await stage.engine.end(submit, "abort")
    attach = await stage.engine.read_attach()
    known = attach.views[0].tokens.tolist()
    submit = await stage.engine.accept_attach(attach, known)
    await stage.engine.generate(submit, tokens_of(stage, "cd"))
    response = await waiting
    assert response.json()["choices"][0]["text"] == "abcd"


async def test_a_request_ended_by_reason_alone_finishes_with_it(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
    await stage.engine.end(submit, "length")
    response = await waiting
    assert response.json()["choices"][0]["text"] == "ab"
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_a_gap_is_mended_from_what_the_client_has(stage: Stage) -> None:
    engine = stage.engine
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        await engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        engine.step_number += 1
        await engine.generate(submit, tokens_of(stage, "d"), flag=None)
        attach = await engine.read_attach()
        assert attach.views[0].tokens.tolist() == tokens_of(stage, "ab")
        assert not attach.exact
        submit = await engine.accept_attach(attach, tokens_of(stage, "abcd"))
        await engine.generate(submit, tokens_of(stage, "e"))
        await finish(stream, "abcde")


async def test_what_the_client_has_wins_over_another_history(stage: Stage) -> None:
    engine = stage.engine
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        await engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        await engine.start_epoch()
        await engine.accept(submit, tokens_of(stage, "aX"))
        await engine.generate(submit, tokens_of(stage, "Y"), flag=None)
        submit = await engine.accept_attach(await engine.read_attach())
        await engine.generate(submit, tokens_of(stage, "cd"))
        await finish(stream, "abcd")


async def test_an_answer_that_is_another_history_ends_the_stream_with_an_error(
    stage: Stage,
) -> None:
    engine = stage.engine
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        await engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        engine.step_number += 1
        await engine.generate(submit, tokens_of(stage, "d"), flag=None)
        attach = await engine.read_attach()
        await engine.accept_attach(attach, tokens_of(stage, "aX"))
        [last] = await stream.rest()
    assert "history" in json.loads(last)["error"]["message"]
    abort = await engine.read_abort()
    assert (abort.request_id, abort.attachment) == (submit.request_id, attach.attachment)


async def test_missed_log_probabilities_are_requested_again(stage: Stage) -> None:
    engine = stage.engine
    waiting = stage.spawn(stage.complete(logprobs=0))
    submit = await engine.accept_next()
    [first], [second] = tokens_of(stage, "a"), tokens_of(stage, "b")

    async def step(token: int, ended: EndFlag | None = None) -> None:
        row = submit.request_id
        await engine.step(
            {row: token}, {row: ended} if ended else None, {row: scores(token, -0.5, {})}
        )

    await step(first)
    engine.step_number += 1
    await step(second)
    attach = await engine.read_attach()
    assert attach.exact
    assert attach.views[0].tokens.tolist() == [first]
    await engine.accept_attach(attach)
    await step(second, EndFlag.LENGTH)
    choice = (await waiting).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.5]


async def test_an_attachment_without_an_answer_is_sent_again(stage: Stage) -> None:
    engine = stage.engine
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        engine.step_number += 7
        await engine.step({})
        engine.step_number += 7
        await engine.step({})
        first, again = await engine.read_attach(), await engine.read_attach()
        assert first.attachment == again.attachment
        submit = await engine.accept_attach(again)
        await engine.generate(submit, tokens_of(stage, "ab"))
        await finish(stream, "ab")


# ------------------------------------------------------------------ the client


async def test_a_client_that_leaves_a_stream_aborts_its_request(stage: Stage) -> None:
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
    abort = await stage.engine.read_abort()
    assert (abort.request_id, abort.attachment) == (submit.request_id, submit.attachment)
    assert "disconnect" in abort.reason


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_aborts_its_requests(
    stage: Stage, stream: bool
) -> None:
    waiting = stage.spawn(stage.complete(stream=stream, prompt=["Hi", "Ho"]))
    submits = [await stage.engine.read_submit() for _ in range(2)]
    waiting.cancel()
    aborts = [await stage.engine.read_abort() for _ in range(2)]
    assert {abort.request_id for abort in aborts} == {submit.request_id for submit in submits}
    await stage.until(lambda: stage.model.engine.num_open == 0)


async def open_unread_stream(stage: Stage) -> asyncio.StreamWriter:
    """A client that asks for more than its buffers hold, and reads none of it."""
    host, port = stage.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": True, "max_tokens": 200})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "word " * 25_000), flag=None)
    return writer


async def test_a_client_that_does_not_read_does_not_delay_others(stage: Stage) -> None:
    writer = await open_unread_stream(stage)
    stage.answer_text("Hi")
    assert (await stage.complete()).json()["choices"][0]["text"] == "Hi"
    writer.transport.abort()
    await stage.until(lambda: any(type(m).__name__ == "Abort" for m in stage.engine.received))


async def test_a_client_that_does_not_read_cannot_hold_up_the_end(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_timeout=0.0)
    writer = await open_unread_stream(stage)
    stage.server.stop()
    assert await stage.running == 0
    await stage.engine.read_abort()
    writer.transport.abort()


# ----------------------------------------------------------------- the gateway


async def test_a_draining_gateway_refuses_requests_and_lets_streams_end(stage: Stage) -> None:
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        stage.server.stop()
        await stage.until(lambda: stage.server.service.draining)
        refused = await stage.complete()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await stage.http.get("/health/ready")).status_code == 503
        assert (await stage.http.get("/health/live")).status_code == 200
        await stage.engine.generate(submit, tokens_of(stage, "ab"))
        *_, done = await stream.rest()
    assert done == "[DONE]"
    assert await stage.running == 0


async def test_streams_that_outlast_the_drain_end_with_an_error(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_timeout=0.05)
    waiting = stage.spawn(stage.complete())
    async with Stream(stage) as stream:
        submits = [await stage.engine.accept_next() for _ in range(2)]
        stage.server.stop()
        [last] = await stream.rest()
    assert "shutting down" in json.loads(last)["error"]["message"]
    assert (await waiting).status_code == 503
    assert await stage.running == 0
    aborts = [await stage.engine.read_abort() for _ in range(2)]
    assert {abort.request_id for abort in aborts} == {submit.request_id for submit in submits}


async def test_a_gateway_whose_reader_fails_leaves_with_an_error(make_stage: MakeStage) -> None:
    stage = await make_stage()
    waiting = stage.spawn(stage.complete())
    await stage.engine.accept_next()
    engine = stage.model.engine

    def broken(entry: Entry) -> Sequence[object]:
        raise RuntimeError("a bug")

    engine._follower.apply = broken  # type: ignore[method-assign,assignment]
    await stage.engine.start_epoch()
    assert (await waiting).status_code == 503
    assert await stage.running == 1


class CountedLooks(MemoryBus):
    """Counts how often a gateway has looked at the engine."""

    num_looks = 0

    async def memory_share(self) -> float:
        self.num_looks += 1
        return await super().memory_share()


async def test_an_attach_is_repeated_only_while_a_scheduler_is_there(
    monkeypatch: pytest.MonkeyPatch, make_stage: MakeStage
) -> None:
    bus = CountedLooks(lambda: time.time_ns() // 1_000_000)
    stage = await make_stage(bus=bus)
    loop, requests = asyncio.get_running_loop(), stage.engine.keys.requests

    async def pass_time(seconds: float) -> None:
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + seconds)
        looks = bus.num_looks
        await stage.until(lambda: bus.num_looks > looks + 2)

    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.step({submit.request_id: tokens_of(stage, "a")[0]})
        await stream.read_text(1)
        stage.engine.step_number += 1  # a result is missing
        await stage.engine.step({})
        first = await stage.engine.read_attach()
        await stage.engine.publish(state="starting")
        engine = stage.model.engine
        await stage.until(lambda: isinstance(engine.status, EngineAway))
        length = await bus.length(requests)
        await pass_time(60)
        assert await bus.length(requests) == length
        await stage.engine.publish()
        again = await stage.engine.read_attach()
        assert (again.request_id, again.attachment) == (first.request_id, first.attachment)
        submit = await stage.engine.accept_attach(again)
        await stage.engine.generate(submit, tokens_of(stage, "b"))
        assert "b" in "".join(await stream.rest())
