"""What fits the KV cache, and what a request brings along for the scheduler."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.engine_status import Engine
from shared.messages.endings import EndFlag
from shared.messages.leases import ModelInfo
from tests.gateway.conftest import MakeStage, Stage, events
from tests.gateway.fake_engine import kv_pool


def engine(num_blocks: int, block_size: int, max_model_len: int = 10**6) -> Engine:
    model = ModelInfo("demo", 4096, max_model_len, "float32", (1,))
    return Engine(model, kv_pool(num_blocks, block_size), max_num_sequences=16)


async def small_stage(make_stage: MakeStage, num_blocks: int) -> Stage:
    """An engine with blocks of 16 tokens."""
    stage = await make_stage(ready=False)
    await stage.engine.publish(kv=kv_pool(num_blocks))
    await stage.until(lambda: stage.server.service.why_not_ready() is None)
    return stage


def error_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    return error


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_choices", "needed"),
    [
        (1, 1, 1, 1),
        (16, 1, 1, 1),
        (16, 2, 1, 2),
        (17, 1, 1, 2),
        (16, 1, 3, 3),  # the last prompt token's block is each one's own
        (17, 1, 3, 4),
        (33, 16, 2, 4),
        (33, 17, 2, 6),
    ],
)
def test_choices_share_the_full_blocks_of_their_prompt(
    num_prompt: int, max_tokens: int, num_choices: int, needed: int
) -> None:
    assert engine(64, 16).blocks_needed(num_prompt, max_tokens, num_choices) == needed


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 90), st.integers(1, 9))
def test_the_most_that_fits_fits_and_one_more_does_not(
    num_blocks: int, block_size: int, num_prompt: int, num_choices: int
) -> None:
    pool = engine(num_blocks, block_size)
    most = pool.max_tokens_for(num_prompt, num_choices)
    if most >= 1:
        assert pool.blocks_needed(num_prompt, most, num_choices) <= num_blocks
    assert pool.blocks_needed(num_prompt, max(0, most) + 1, num_choices) > num_blocks


def test_the_context_limits_what_fits_too() -> None:
    assert engine(64, 16, max_model_len=100).max_tokens_for(90, 1) == 10


async def test_choices_that_do_not_fit_are_refused_with_the_numbers(make_stage: MakeStage) -> None:
    stage = await small_stage(make_stage, 8)
    error = error_of(await stage.complete(prompt=[5] * 40, n=3, max_tokens=30))
    assert error["param"] == "max_tokens"
    for number in ("40 tokens", "is 30", "3 choices", "11 blocks", "16 tokens", "has 8"):
        assert number in error["message"]
    error = error_of(await stage.complete(prompt=[5] * 40, n=7))
    assert error["param"] == "n"
    for number in ("40 tokens", "is 7", "9 blocks", "has 8"):
        assert number in error["message"]
    error = error_of(await stage.complete(prompt=[5] * 40, n=2, best_of=9))
    assert error["param"] == "best_of"
    assert "11 blocks" in error["message"]
    assert stage.engine.received == []


async def test_exactly_what_the_pool_holds_is_taken(make_stage: MakeStage) -> None:
    stage = await small_stage(make_stage, 8)
    stage.answer(lambda _: [50])
    # The last token needs no slot: 2 blocks are shared, 3 x 2 are each one's own.
    assert (await stage.complete(prompt=[5] * 40, n=3, max_tokens=25)).status_code == 200
    error_of(await stage.complete(prompt=[5] * 40, n=3, max_tokens=26))
    assert (await stage.complete(prompt=[5] * 128, max_tokens=1)).status_code == 200
    error_of(await stage.complete(prompt=[5] * 129, max_tokens=1))


async def test_a_limit_that_was_not_given_is_clamped_to_what_fits(make_stage: MakeStage) -> None:
    stage = await small_stage(make_stage, 8)
    stage.answer(lambda _: [50])
    await stage.complete(prompt=[5] * 40, n=6)
    await stage.complete(prompt=[5] * 40, n=3)
    await stage.chat(n=2)
    received: list[Any] = stage.engine.received
    assert [submit.sampling.max_tokens for submit in received[:2]] == [48 - 40 + 1, 16]
    length = len(received[2].prompt)
    assert length <= 16
    assert received[2].sampling.max_tokens == 4 * 16 - length + 1


async def test_priority_and_salt_reach_the_scheduler(stage: Stage) -> None:
    stage.answer(lambda _: [50])
    await stage.complete()
    for post in (stage.complete, stage.chat):
        for priority in (-(2**31), 2**31 - 1):
            response = await post(priority=priority, cache_salt="ä" * 256)
            assert response.status_code == 200
    await stage.chat(priority=None, cache_salt=None, n=None)
    first, *explicit, last = stage.engine.received
    for submit in (first, last):
        assert (submit.priority, submit.cache_salt, submit.num_choices) == (0, "", 1)  # type: ignore[attr-defined]
    assert [submit.priority for submit in explicit] == [-(2**31), 2**31 - 1] * 2  # type: ignore[attr-defined]
    assert {submit.cache_salt for submit in explicit} == {"ä" * 256}  # type: ignore[attr-defined]


async def play_cached(stage: Stage, *reports: dict[int, int]) -> None:
    """Answer the next request with one token a step, each step reporting admissions."""
    submit = await stage.engine.accept_next()
    name = submit.request_id
    for position, report in enumerate(reports):
        rows = [(name, number) for number in range(submit.num_choices)]
        last = position == len(reports) - 1
        await stage.engine.step(
            dict.fromkeys(rows, 50),
            dict.fromkeys(rows, EndFlag.LENGTH) if last else {},
            admitted={(name, number): computed for number, computed in report.items()},
        )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([{}], 0),
        ([{0: 0}, {0: 3}], 0),
        ([{0: 2}, {0: 3}], 2),
        ([{0: 2}, {0: 4, 1: 4}], 2),
        ([{0: 99}], 4),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_of_the_first_admission(
    stage: Stage, stream: bool, reports: list[dict[int, int]], expected: int
) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7, 8], "n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    waiting = stage.spawn(stage.complete(**body))
    await play_cached(stage, *reports)
    response = await waiting
    usage = json.loads(events(response.text)[-2])["usage"] if stream else response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    assert usage["prompt_tokens"] == 4


async def test_cached_tokens_of_several_prompts_are_added(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=[[5, 6, 7], [8, 9]]))
    submits = [await stage.engine.read_submit() for _ in range(2)]
    await stage.engine.append(*(stage.engine.state(submit) for submit in submits))
    names = [submit.request_id for submit in submits]
    await stage.engine.step(
        dict.fromkeys(names, 50),
        dict.fromkeys(names, EndFlag.LENGTH),
        admitted={names[0]: 2, names[1]: 1},
    )
    usage = (await waiting).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    lines = (await stage.http.get("/metrics")).text.splitlines()
    [line] = [one for one in lines if one.startswith("pagestream:prompt_tokens_cached_total{")]
    assert line.endswith(" 3.0")


async def test_more_choices_than_run_at_once_are_refused(stage: Stage) -> None:
    response = await stage.complete(n=17, max_tokens=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert "n=17: at most 16 choices run at once" in response.json()["error"]["message"]
