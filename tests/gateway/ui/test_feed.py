"""The feed of an engine's blocks: when logs are read, what viewers see, and limits."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.errors import ApiError
from gateway.ui.engine_feed import EngineFeed
from gateway.ui.viewers import MOST_VIEWERS, MOST_VIEWERS_OF_KEY, Viewer, Viewers
from shared.bus.api import Entry
from shared.bus.memory import MemoryBus
from shared.engine_view.log_follower import LogFollower
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.ui.logged_engine import KEYS, LoggedEngine
from tests.support.requests import submit


class CountingBus(MemoryBus):
    """Counts reads of the logs of plans."""

    num_reads = 0

    async def read(self, cursors: Any, block_ms: int, max_entries: int) -> dict[str, list[Entry]]:
        self.num_reads += KEYS.plans in cursors
        return await super().read(cursors, block_ms, max_entries)


@pytest.fixture
def bus() -> CountingBus:
    return CountingBus(lambda: 1_000)


@pytest.fixture
async def logged(bus: CountingBus) -> LoggedEngine:
    """An engine with a request of each of two keys, that run."""
    found = LoggedEngine(bus, epoch=5_000_000)
    found.engine.ask(
        submit("mine", [1] * 9, max_tokens=30, tenant="me"),
        submit("yours", [2] * 9, max_tokens=30, tenant="you"),
    )
    found.engine.step()
    found.engine.snapshot()
    found.engine.step()
    return found


@asynccontextmanager
async def opened(stage: Stage, **headers: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of a feed."""

    async def events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any]]:
        name = ""
        async for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    async with stage.http.stream("GET", "/ui/feed", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["cache-control"] == "no-store"
        yield events(response.aiter_lines())


async def until(events: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async with asyncio.timeout(10):
        async for found, data in events:
            if found == name:
                return data
    raise AssertionError("the feed has ended")


async def test_the_logs_are_read_once_for_all_viewers_and_only_while_there_are_any(
    make_stage: MakeStage, bus: CountingBus, logged: LoggedEngine
) -> None:
    stage = await make_stage(bus=bus)
    await logged.write()
    await asyncio.sleep(0)
    assert bus.num_reads == 0
    async with opened(stage) as one, opened(stage) as two:
        first, second = await until(one, "snapshot"), await until(two, "snapshot")
        assert first["step"] == second["step"] == logged.engine.core.planned_step
        assert first["num_blocks"] == 24
        assert [row[2] for row in first["requests"]] == [9, 9], "lengths of prompts"
        num_tasks = sum(task.get_name() == "page feed" for task in asyncio.all_tasks())
        assert num_tasks == 1
        logged.engine.step()
        await logged.write()
        frame = await until(two, "frame")
        assert frame["step"] == logged.engine.core.planned_step
        assert (await until(one, "frame")) == frame
    await stage.until(
        lambda: not any(task.get_name() == "page feed" for task in asyncio.all_tasks())
    )
    num_reads = bus.num_reads
    logged.engine.step()
    await logged.write()
    await asyncio.sleep(0)
    assert bus.num_reads == num_reads


async def test_a_key_sees_ids_of_its_own_requests_and_numbers_of_others_and_no_prompts(
    make_stage: MakeStage, bus: CountingBus, logged: LoggedEngine, tmp_path: Any
) -> None:
    keys = tmp_path / "keys"
    digest = hashlib.sha256(b"key-of-me-123456").hexdigest()
    keys.write_text(f"me sha256:{digest}\n")
    stage = await make_stage(bus=bus, api_keys=str(keys))
    await logged.write()
    check_error(await stage.http.get("/ui/feed"), 401)
    headers = {"authorization": "Bearer key-of-me-123456"}
    async with opened(stage, **headers) as events:
        names = await until(events, "names")
        snapshot = await until(events, "snapshot")
    assert [name for _, name in names] == ["mine"]
    assert len(snapshot["requests"]) == 2
    assert "yours" not in json.dumps(snapshot)
    assert "mine" not in json.dumps(snapshot)


async def test_without_a_scheduler_its_last_state_is_shown_and_what_is_missing(
    make_stage: MakeStage, bus: CountingBus, logged: LoggedEngine
) -> None:
    stage = await make_stage(bus=bus, ready=False)
    await logged.write()
    async with opened(stage) as events:
        await until(events, "snapshot")
        status = await until(events, "status")
        assert status == {"state": "away", "detail": "no scheduler serves engine 'engine-0'"}
        logged.engine.step()
        await logged.write()
        assert (await until(events, "status"))["state"] == "live"


async def test_without_snapshots_the_feed_tells_why_it_is_empty(stage: Stage) -> None:
    async with opened(stage) as events:
        status = await until(events, "status")
    assert status["state"] == "waiting"
    assert "--plans-retention" in status["detail"]


async def test_an_unknown_engine_is_a_400_and_the_page_can_be_switched_off(
    make_stage: MakeStage, stage: Stage
) -> None:
    check_error(await stage.http.get("/ui/feed?engine=none"), 400, "engine")
    assert (await stage.http.get("/ui/engines")).json() == ["engine-0"]
    off = await make_stage(ui=False)
    check_error(await off.http.get("/ui/feed"), 404)


async def test_a_draining_gateway_ends_its_feeds(stage: Stage) -> None:
    async with opened(stage) as events:
        await until(events, "status")
        stage.server.stop()
        async with asyncio.timeout(10):
            assert [name async for name, _ in events] == []


def test_pages_are_limited_for_each_key_and_in_all() -> None:
    viewers = Viewers()
    places = []

    def take(key: str) -> None:
        place = viewers.place_for(key)
        place.__enter__()
        places.append(place)

    for _ in range(MOST_VIEWERS_OF_KEY):
        take("a")
    with pytest.raises(ApiError) as refused:
        take("a")
    assert refused.value.status == 429
    while len(places) < MOST_VIEWERS:
        take(f"key {len(places)}")
    with pytest.raises(ApiError) as refused:
        take("b")
    assert refused.value.status == 503
    places.pop(0).__exit__(None, None, None)
    take("a")


async def test_a_viewer_that_does_not_read_skips_to_a_snapshot() -> None:
    viewer = Viewer("")
    view = None

    async def shown() -> str:
        found = await viewer.next(lambda: '{"a":1}', lambda: view, 1.0)
        assert found is not None
        return found.decode()

    assert (await shown()).startswith("event: snapshot")
    viewer.show("frame", "1")
    assert await shown() == "event: frame\ndata: 1\n\n"
    for number in range(100):
        viewer.show("frame", str(number))
    assert await shown() == 'event: snapshot\ndata: {"a":1}\n\n'
    viewer.end()
    assert await viewer.next(lambda: "", lambda: view, 1.0) is None


async def test_a_reader_that_starts_reads_from_the_last_snapshot_on(
    bus: CountingBus, logged: LoggedEngine
) -> None:
    for _ in range(5):
        logged.engine.step()
    logged.engine.snapshot()
    await logged.write()
    feed, viewer = EngineFeed(bus, "engine-0", hash), Viewer("")
    begun = await feed._begin(LogFollower(hash))
    assert begun[KEYS.plans].seq == logged.engine.core.planned_step
    feed.join(viewer)
    assert feed.is_read
    await feed.leave(viewer)
    assert not feed.is_read
