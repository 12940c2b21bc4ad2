"""What happens to requests while the bus is away, and after it has lost entries."""

import asyncio
import json
from collections.abc import Mapping

import pytest

from gateway.engine.engine_status import EngineAway
from shared.bus.api import Append, Entry, EntryId
from shared.bus.memory import MemoryBus
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable
from shared.messages.endings import EndFlag
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.event_streams import Stream, finish, tokens_of


class FlakyBus(MemoryBus):
    """A bus that can be away, and come back as another server."""

    away = False
    server = "first"
    refuse_appends = False

    async def append(self, append: Append) -> EntryId:
        self._check(self.refuse_appends)
        return await super().append(append)

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        self._check()
        return await super().read(cursors, min(block_ms, 10), max_entries)

    async def run_id(self) -> str:
        self._check()
        return self.server

    def forget_from(self, log: str, first: EntryId) -> None:
        """Lose the tail of a log."""
        kept = [entry for entry in self._logs[log].entries if entry.id < first]
        self._logs[log].entries = kept
        self._logs[log].last = kept[-1].id

    def _check(self, too: bool = False) -> None:
        if self.away or too:
            raise BusUnavailable("away")


async def flaky_stage(make_stage: MakeStage, **settings: object) -> tuple[Stage, FlakyBus]:
    ticks = iter(range(1_000, 10**9))
    bus = FlakyBus(lambda: next(ticks))
    return await make_stage(bus=bus, **settings), bus


async def test_a_request_that_cannot_be_appended_is_a_503(make_stage: MakeStage) -> None:
    stage, bus = await flaky_stage(make_stage, bus_patience=0.2)
    bus.refuse_appends = True
    response = await stage.complete()
    assert response.status_code == 503
    assert "retry-after" in response.headers
    bus.refuse_appends = False
    # It may have been carried out all the same.
    attach = await stage.engine.read_attach()
    assert (await stage.engine.read_abort()).attachment == attach.attachment


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_the_engine_never_answers_is_a_503(
    make_stage: MakeStage, stream: bool
) -> None:
    stage = await make_stage(bus_patience=0.2)
    response = await stage.complete(stream=stream)
    assert response.status_code == 503
    assert "did not answer" in response.json()["error"]["message"]
    submit = await stage.engine.read_submit()
    assert (await stage.engine.read_abort()).attachment == submit.attachment


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_whose_append_failed_is_taken_when_the_bus_is_back(
    make_stage: MakeStage, stream: bool
) -> None:
    stage, bus = await flaky_stage(make_stage)
    bus.refuse_appends = True
    waiting = stage.spawn(stage.complete(stream=stream))
    await stage.until(lambda: stage.model.engine.num_open == 1)
    bus.refuse_appends = False
    attach = await stage.engine.read_attach()
    submit = await stage.engine.accept_attach(attach)
    await stage.engine.generate(submit, tokens_of(stage, "ab"))
    response = await waiting
    assert response.status_code == 200
    assert ("[DONE]" in response.text) == stream


async def test_a_stream_ends_with_an_error_when_the_bus_stays_away(make_stage: MakeStage) -> None:
    stage, bus = await flaky_stage(make_stage, bus_patience=0.2)
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        bus.away = True
        [last] = await stream.rest()
    assert "Redis has been away" in json.loads(last)["error"]["message"]
    bus.away = False
    assert (await stage.engine.read_abort()).request_id == submit.request_id


async def test_a_stream_ends_with_an_error_when_the_engine_has_failed_for_good(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        await stage.engine.publish(state="starting", detail="the worker cannot start: no folder")
        await stage.until(lambda: isinstance(stage.model.engine.status, EngineAway))
        assert stage.model.engine.num_open == 1, "it may come back"
        await stage.engine.publish(state="failed", detail="no folder")
        [last] = await stream.rest()
    assert "is failed: no folder" in json.loads(last)["error"]["message"]
    assert (await stage.engine.read_abort()).request_id == submit.request_id


async def test_the_gateway_renews_its_lease(
    monkeypatch: pytest.MonkeyPatch, make_stage: MakeStage
) -> None:
    stage, bus = await flaky_stage(make_stage)
    engine = stage.model.engine
    key = stage.engine.keys.gateway(engine.instance)
    assert await bus.get(key) is not None
    await bus.put(key, b"", 0)
    assert await bus.get(key) is None
    monkeypatch.setattr(engine, "_renew_s", 0.0)  # it is due
    async with asyncio.timeout(5):
        while await bus.get(key) is None:
            await asyncio.sleep(0.002)


async def test_an_open_stream_survives_a_bus_that_is_away_for_a_while(
    make_stage: MakeStage,
) -> None:
    stage, bus = await flaky_stage(make_stage)
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
    bus.away = True
    await stage.until(lambda: stage.model.engine._must_find_position)
    bus.away = False
    await stage.engine.generate(submit, tokens_of(stage, "cd"))
    assert (await waiting).json()["choices"][0]["text"] == "abcd"


async def test_after_a_lost_tail_a_stream_waits_for_a_newer_epoch(make_stage: MakeStage) -> None:
    stage, bus = await flaky_stage(make_stage)
    engine = stage.engine
    async with Stream(stage) as stream:
        submit = await engine.accept_next()
        await engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        last = await bus.last_id(engine.keys.outputs)
        await stream.read_text(2)
        bus.away = True
        await stage.until(lambda: stage.model.engine._must_find_position)
        bus.forget_from(engine.keys.outputs, last)
        bus.server = "second"
        bus.away = False
        await stage.until(lambda: stage.model.engine._run_id == "second")
        # The old epoch writes another token where one was lost: no client may get it.
        engine.step_number -= 1
        await engine.generate(submit, tokens_of(stage, "X"), flag=None)
        await engine.start_epoch()
        # The new scheduler knows the half of what the client has, and then more than that.
        await engine.accept(submit, tokens_of(stage, "a"))
        submit = await engine.accept_attach(await engine.read_attach())
        await engine.generate(submit, tokens_of(stage, "cd"), EndFlag.STOP)
        await finish(stream, "abcd")


async def test_requests_that_the_log_reflects_are_trimmed(stage: Stage) -> None:
    stage.answer_text("Hi")
    for _ in range(4):
        await stage.complete()
    assert await stage.engine.bus.length(stage.engine.keys.requests) < 4


async def test_calls_that_only_attach_trim_what_the_log_reflects(stage: Stage) -> None:
    async def answer() -> None:
        while True:
            submit = await stage.engine.accept_attach(await stage.engine.read_attach())
            await stage.engine.generate(submit, tokens_of(stage, "Hi"))

    stage.spawn(answer())
    body = {"model": "demo", "prompt": "Hi"}
    for key in range(4):
        headers = {"Idempotency-Key": str(key)}
        response = await stage.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
    assert await stage.engine.bus.length(stage.engine.keys.requests) < 4


async def test_nothing_is_trimmed_while_the_server_may_be_another_one(
    make_stage: MakeStage,
) -> None:
    stage, bus = await flaky_stage(make_stage)
    engine = stage.model.engine
    async with Stream(stage) as stream:
        submit = await stage.engine.accept_next()
        await stage.engine.generate(submit, tokens_of(stage, "ab"), flag=None)
        await stream.read_text(2)
        assert engine._trim_below() == stage.engine.requests_cursor
        bus.away = True
        await stage.until(lambda: engine._trim_below() is None)
        bus.away = False
        await stage.until(lambda: engine._trim_below() is not None)
        await stage.engine.generate(submit, tokens_of(stage, "c"))
        await finish(stream, "abc")


async def test_the_gateway_works_over_redis(make_stage: MakeStage, redis_url: str) -> None:
    buses = [RedisBus(redis_url), RedisBus(redis_url)]
    stage = await make_stage(bus=buses[0])
    stage.engine.bus = buses[1]
    stage.answer_text("It works.")
    assert (await stage.complete()).json()["choices"][0]["text"] == "It works."
    async with Stream(stage) as stream:
        *_, done = await stream.rest()
    assert done == "[DONE]"
    stage.server.stop()
    assert await stage.running == 0
    for task in stage.tasks:
        task.cancel()
    await asyncio.gather(*stage.tasks, return_exceptions=True)
    for bus in buses:
        await bus.close()
