"""Maps for the next plan while one is carried out (vAttention, section 6.1).

The worker's loop reads a plan when the one before is done; by then it has usually been in the log
for long. So a thread reads the same log, with a cursor and a connection of its own, and hands each
plan over as soon as the step before is under way. It only saves time: without it, or if it comes
too late, everything is mapped when its plan is carried out.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from shared.bus.api import Bus, Entry
from shared.bus.keys import EngineKeys
from shared.codec import decode
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages import EpochStarted, StepPlan

_BLOCK_MS = 500
_RETRY_S = 0.5
_MAX_ENTRIES = 64

log = EventLog(__name__)


class Foreseeing(Protocol):
    """Who prepares for plans; ``foresee`` is called on the thread."""

    when_placed: Callable[[int], None] | None

    def foresee(self, plan: StepPlan) -> None:
        """Prepare for the next plan."""


class LookAhead:
    """One thread for one executor.

    Args:
        open_bus: connects to the logs; called on the thread.
        engine_id: whose plans.
        executor: who prepares.
        device: where mappings are.
    """

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        engine_id: str,
        executor: Foreseeing,
        device: torch.device,
    ) -> None:
        self._open_bus = open_bus
        self._key = EngineKeys(engine_id).plans
        self._executor = executor
        self._device = device
        self._plans: dict[int, StepPlan] = {}  # by step, those that are still to come
        self._step = 0  # the latest one under way
        self.is_reading = False  # what is appended from now on is seen
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="look-ahead", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Look ahead until the block is left."""
        self._executor.when_placed = self._placed
        self._thread.start()
        try:
            yield
        finally:
            self._executor.when_placed = None
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
            self._loop.close()

    def _placed(self, step: int) -> None:
        """Of any thread: a step is under way."""
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._under_way, step)

    def _under_way(self, step: int) -> None:
        self._step = step
        for known in [known for known in self._plans if known <= step]:
            del self._plans[known]
        self._foresee()

    def _foresee(self) -> None:
        plan = self._plans.pop(self._step + 1, None)
        if plan is not None:
            self._executor.foresee(plan)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("nothing is mapped ahead any more")
            self._executor.when_placed = None

    async def _serve(self) -> None:
        reading = asyncio.ensure_future(self._read())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    async def _read(self) -> None:
        bus = self._open_bus()
        try:
            while True:
                try:
                    await self._follow(bus)
                except BusUnavailable:
                    await asyncio.sleep(_RETRY_S)  # the worker's loop says so
        finally:
            await bus.close()

    async def _follow(self, bus: Bus) -> None:
        cursor = await bus.last_id(self._key)
        self.is_reading = True
        while True:
            found = await bus.read({self._key: cursor}, _BLOCK_MS, _MAX_ENTRIES)
            for entry in found.get(self._key, ()):
                cursor = entry.id
                self._take(entry)

    def _take(self, entry: Entry) -> None:
        for data in entry.messages:
            try:
                message = decode(data)
            except DecodeError:
                return  # the worker's loop says so
            if isinstance(message, EpochStarted):
                self._plans.clear()
                self._step = 0
            elif isinstance(message, StepPlan):
                self._plans[message.step] = message
                self._foresee()
