"""Reads an engine's logs while there are viewers, and sends all of them what changes."""

import asyncio
import json
from collections.abc import Callable

from gateway.ui.viewers import Viewer
from shared.bus.api import START, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.engine_view.engine_view import EngineView
from shared.engine_view.frames import FrameSource
from shared.engine_view.log_follower import LogFollower
from shared.errors import BusUnavailable
from shared.logs import EventLog
from shared.tasks import cancel_until_done

FRAME_S = 0.1  # between two frames
_MOST_SHARE = 0.04  # of a processor's time, for frames; those of large pools come less often
_LARGE_POOL = 20_000  # blocks; its frames are made in a thread
_BLOCK_MS = 500
_MOST_ENTRIES = 100  # of each log; more would keep the event loop too long
_RETRY_S = 1.0
_NO_PLANS = (
    "the engine has written no snapshot of its blocks so far: its scheduler is starting, runs with "
    "--plans-retention 0, or is of an earlier version"
)

_log = EventLog("gateway.ui.engine_feed")


class EngineFeed:
    """One reader of one engine; it runs from the first viewer to the last.

    Args:
        number_of: the number that stands for a request's id.
    """

    def __init__(self, bus: Bus, engine_id: str, number_of: Callable[[str], int]) -> None:
        self._bus = bus
        self._keys = EngineKeys(engine_id)
        self._number_of = number_of
        self._viewers: dict[Viewer, None] = {}
        self._reader: asyncio.Task[None] | None = None
        self._frames = FrameSource()
        self._view: EngineView | None = None
        self._status = ""

    @property
    def is_read(self) -> bool:
        """Whether the reader runs."""
        return self._reader is not None

    @property
    def view(self) -> EngineView | None:
        """The state that was shown last."""
        return self._view

    def snapshot(self) -> str:
        """That state as JSON; "" if there is none."""
        return self._frames.snapshot()

    def join(self, viewer: Viewer) -> None:
        """Send the feed to one more viewer."""
        self._viewers[viewer] = None
        if self._status:
            viewer.show("status", self._status)
        if self._reader is None:
            self._reader = asyncio.create_task(self._run(), name="page feed")

    async def leave(self, viewer: Viewer) -> None:
        """Send a viewer nothing more."""
        self._viewers.pop(viewer, None)
        if not self._viewers and self._reader is not None:
            reader, self._reader = self._reader, None
            await cancel_until_done(reader)
            if self._reader is None:
                self._frames, self._view, self._status = FrameSource(), None, ""

    def end(self) -> None:
        """Let all viewers leave."""
        for viewer in self._viewers:
            viewer.end()

    async def _run(self) -> None:
        _log.info("reader started", engine=self._keys.engine_id)
        try:
            while True:
                try:
                    await self._read_on()
                except BusUnavailable as error:
                    self._tell("away", f"Redis does not answer: {error}")
                    await asyncio.sleep(_RETRY_S)
        except asyncio.CancelledError:
            _log.info("reader stopped", engine=self._keys.engine_id)
            raise
        except Exception:
            _log.exception("reader failed")
            self._tell("failed", "the reader of the engine's logs has failed")
            raise

    async def _read_on(self) -> None:
        """Begin at the last snapshot, and read until Redis is gone or the logs begin anew."""
        follower = LogFollower(self._number_of)
        cursors = await self._begin(follower)
        run_id = await self._bus.run_id()
        loop = asyncio.get_running_loop()
        while run_id == await self._bus.run_id():
            due_s = loop.time() + FRAME_S
            is_behind = True
            while is_behind:
                found = await self._bus.read(cursors, _BLOCK_MS, _MOST_ENTRIES)
                follower.read(*(found.get(log, ()) for log in cursors))
                cursors |= {log: entries[-1].id for log, entries in found.items()}
                is_behind = any(len(entries) >= _MOST_ENTRIES for entries in found.values())
                if is_behind:
                    await asyncio.sleep(0)
            if follower.view is not None:
                began_s = loop.time()
                await self._publish(follower.view)
                due_s = max(due_s, began_s + (loop.time() - began_s) / _MOST_SHARE)
            if not found and await self._bus.get(self._keys.info) is None:
                self._tell("away", f"no scheduler serves engine {self._keys.engine_id!r}")
            elif follower.view is None:
                self._tell("waiting", _NO_PLANS)
            elif self._status:
                self._tell("live", "")
            await asyncio.sleep(due_s - loop.time())

    async def _begin(self, follower: LogFollower) -> dict[str, EntryId]:
        keys = self._keys
        last = await self._bus.last_id(keys.snapshots)
        if last > START:
            before = EntryId(last.epoch, last.seq - 1) if last.seq else START
            for entry in (await self._bus.read({keys.snapshots: before}, 0, 1)).get(
                keys.snapshots, ()
            ):
                if (begun := follower.begin(entry)) is not None:
                    return {keys.plans: begun[0], keys.outputs: begun[1], keys.snapshots: entry.id}
        return {
            keys.plans: await self._bus.last_id(keys.plans),
            keys.outputs: await self._bus.last_id(keys.outputs),
            keys.snapshots: last,
        }

    async def _publish(self, view: EngineView) -> None:
        is_other = view is not self._view
        if view.geometry.num_blocks > _LARGE_POOL:
            frame = await asyncio.to_thread(self._frames.advance, view)
        else:
            frame = self._frames.advance(view)
        self._view = view
        if frame is None:
            return
        for viewer in self._viewers:
            if is_other:
                viewer.show_snapshot()
            else:
                viewer.show("frame", frame)

    def _tell(self, state: str, detail: str) -> None:
        """Tell viewers once why there are no frames, or that there are again."""
        status = json.dumps({"state": state, "detail": detail})
        if status != self._status:
            self._status = status if detail else ""
            for viewer in self._viewers:
                viewer.show("status", status)
