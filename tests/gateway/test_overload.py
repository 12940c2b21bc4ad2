"""What a gateway does when there is more to do than can be done, and when time is short."""

import asyncio
import json
import time

import pytest
from openai import RateLimitError

from shared.bus.memory import MemoryBus
from shared.messages.outputs import RequestEnded
from tests.gateway.conftest import MakeStage, Stage, events
from tests.gateway.test_lifecycle import Stream, tokens_of

TOO_MUCH = "40 requests wait already"


# ----------------------------------------------------------- the engine refuses


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_the_engine_refuses_is_a_429_with_retry_after(
    stage: Stage, stream: bool
) -> None:
    waiting = stage.spawn(stage.complete(stream=stream))
    submit = await stage.engine.read_submit()
    await stage.engine.end(submit, "overloaded", TOO_MUCH)
    response = await waiting
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["message"], error["type"], error["code"]) == (
        TOO_MUCH,
        "rate_limit_error",
        "overloaded",
    )
    metrics = (await stage.http.get("/metrics")).text
    assert (
        'admission_rejections_total{engine="engine-0",model_name="demo",reason="overloaded"} 1.0'
        in metrics
    )
    stage.answer_text("Hi")
    await stage.complete()
    assert [type(message).__name__ for message in stage.engine.received] == [
        "Submit",
        "Submit",
    ]


async def test_while_the_engine_is_full_calls_are_refused_without_asking_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.engine.deliveries._FULL_S", 1e9)
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.read_submit()
    cursor = str(stage.engine.requests_cursor)
    await stage.engine.append(
        RequestEnded(submit.request_id, "overloaded", TOO_MUCH, cursor, for_all=True)
    )
    assert (await waiting).status_code == 429
    refused = await stage.complete()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert (await stage.http.get("/v1/models")).status_code == 200
    assert [type(message).__name__ for message in stage.engine.received] == ["Submit"]
    # Who names a generation may want one that is there already.
    headers = {"Idempotency-Key": "mine"}
    body = {"model": "demo", "prompt": "Hi"}
    named = stage.spawn(stage.http.post("/v1/completions", json=body, headers=headers))
    attach = await stage.engine.read_attach()
    await stage.engine.append(RequestEnded(attach.request_id, "overloaded", TOO_MUCH, cursor))
    assert (await named).status_code == 429


async def test_the_official_client_sees_a_rate_limit(stage: Stage) -> None:
    opening = asyncio.ensure_future(
        stage.openai.completions.create(model="demo", prompt="Hi", stream=True)
    )
    submit = await stage.engine.read_submit()
    await stage.engine.end(submit, "overloaded", TOO_MUCH)
    with pytest.raises(RateLimitError, match=TOO_MUCH):
        await opening


async def test_a_stream_begins_when_the_engine_has_accepted_and_not_before(stage: Stage) -> None:
    opening = stage.spawn(stage.openai.completions.create(model="demo", prompt="Hi", stream=True))
    submit = await stage.engine.read_submit()
    stage.answer_text("Ho")
    await stage.complete()  # a whole other request comes and goes
    assert not opening.done()
    await stage.engine.accept(submit)
    await opening


async def test_a_call_is_refused_as_a_whole_if_one_of_its_prompts_is(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=["a", "b"], stream=True))
    first, second = [await stage.engine.read_submit() for _ in range(2)]
    await stage.engine.accept(first)
    await stage.engine.end(second, "overloaded", TOO_MUCH)
    assert (await waiting).status_code == 429
    abort = await stage.engine.read_abort()
    assert abort.request_id == first.request_id


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_client_that_leaves_before_its_stream_begins_aborts_it(
    stage: Stage, resumable: bool
) -> None:
    waiting = stage.spawn(stage.complete(stream=True, stream_resume=resumable))
    submit = await stage.engine.read_submit()
    waiting.cancel()
    assert (await stage.engine.read_abort()).request_id == submit.request_id
    await stage.until(lambda: stage.model.engine.num_open == 0)


# ---------------------------------------------------------------- the deadline


async def test_a_deadline_reaches_the_engine_as_an_absolute_time(stage: Stage) -> None:
    stage.answer_text("Hi")
    before_ms = time.time_ns() // 1_000_000
    await stage.complete(deadline_ms=5_000)
    after_ms = time.time_ns() // 1_000_000
    await stage.complete()
    with_deadline, without = stage.engine.received
    assert before_ms + 5_000 <= with_deadline.deadline_ms <= after_ms + 5_000  # type: ignore[attr-defined]
    assert without.deadline_ms == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("deadline", [0, -1, 1.5, "soon", 10**12])
async def test_what_can_be_no_deadline_is_refused_by_name(stage: Stage, deadline: object) -> None:
    response = await stage.complete(deadline_ms=deadline)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "deadline_ms"


async def test_what_the_deadline_cut_is_shown_with_its_reason(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(deadline_ms=1))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
    await stage.engine.end(submit, "deadline")
    response = await waiting
    assert response.status_code == 200
    [choice] = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "deadline")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_whose_time_ran_out_in_the_queue_is_an_empty_answer(
    stage: Stage, stream: bool
) -> None:
    waiting = stage.spawn(stage.complete(deadline_ms=1, stream=stream))
    submit = await stage.engine.read_submit()
    await stage.engine.end(submit, "deadline")
    response = await waiting
    assert response.status_code == 200
    if stream:
        chunk, done = events(response.text)
        assert done == "[DONE]"
        [choice] = json.loads(chunk)["choices"]
    else:
        [choice] = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "deadline")


async def test_a_beam_search_that_is_out_of_time_has_nothing_to_show(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2, deadline_ms=1))
    submit = await stage.engine.accept_search()
    await stage.engine.end(submit, "deadline")
    choices = (await waiting).json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("", "deadline")] * 2


# ----------------------------------------------------------- too many at once


async def test_calls_beyond_the_limit_are_refused_while_probes_are_not(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(max_concurrent_calls=2)
    waiting = [stage.spawn(stage.complete(stream=stream)) for stream in (True, False)]
    submits = [await stage.engine.accept_next() for _ in waiting]
    refused = await stage.complete()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "overloaded"
    assert (await stage.http.get("/health/ready")).status_code == 200
    assert (await stage.http.get("/metrics")).status_code == 200
    for submit in submits:
        await stage.engine.generate(submit, tokens_of(stage, "ab"))
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
    stage.answer_text("Hi")
    assert (await stage.complete()).status_code == 200


async def test_an_engine_that_drains_gets_nothing_new(make_stage: MakeStage) -> None:
    stage = await make_stage()
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.publish(draining=True)
        await stage.until(lambda: stage.server.service.why_not_ready() is not None)
        refused = await stage.complete()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "nothing new" in refused.json()["error"]["message"]
        await stage.engine.generate(submit, tokens_of(stage, "ab"))
        *_, done = await stream.rest()
    assert done == "[DONE]"


async def test_what_a_slow_reader_leaves_waits_in_one_piece(stage: Stage) -> None:
    """Memory for a reader that takes nothing grows by its tokens, not by messages."""
    async with Stream(stage, max_tokens=200) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "a"), flag=None)
        await stream.read_text(1)
        [queue] = stage.model.engine._deliveries.queues()
        largest = 0

        def watched(event: object) -> None:
            nonlocal largest
            type(queue).put(queue, event)  # type: ignore[arg-type]
            largest = max(largest, len(queue._events))

        queue.put = watched  # type: ignore[method-assign,assignment]
        await stage.engine.generate(submit, tokens_of(stage, "b" * 150), flag=None)
        await stream.read_text(151)
        await stage.engine.generate(submit, tokens_of(stage, "c"))
        *_, done = await stream.rest()
    assert done == "[DONE]"
    assert largest <= 2


class FullBus(MemoryBus):
    """Its server has a limit of memory."""

    share = 0.0

    async def memory_share(self) -> float:
        return self.share


async def test_without_memory_for_more_new_calls_are_refused_and_open_ones_end(
    make_stage: MakeStage,
) -> None:
    bus = FullBus(lambda: time.time_ns() // 1_000_000)
    stage = await make_stage(bus=bus)
    engine = stage.model.engine
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    bus.share = 0.85
    await stage.until(lambda: engine.is_short_of_memory)
    refused = await stage.complete()
    assert refused.status_code == 429
    assert "short of memory" in refused.json()["error"]["message"]
    assert "retry-after" in refused.headers
    await stage.engine.generate(submit, [5, 6])
    assert (await waiting).status_code == 200
    bus.share = 0.5
    await stage.until(lambda: not engine.is_short_of_memory)
