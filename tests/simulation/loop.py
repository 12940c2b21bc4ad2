"""An event loop in which only the seed decides: virtual time, callbacks in a drawn order.

Every callback belongs to the party in whose context it was scheduled. A party that is frozen is
not run: what would be its turn is held until it is thawed, if ever. So a pause is what SIGSTOP
does, and a crash is a pause without end: nothing is cleaned up.
"""

import asyncio
import contextvars
import heapq
from collections.abc import Coroutine
from random import Random
from typing import Any


class NothingLeft(RuntimeError):
    """No callback is ready and none is scheduled: nothing will ever happen."""


class Party:
    """One process.

    Attributes:
        is_dead: it will never be thawed.
    """

    def __init__(self, name: str, loop: "VirtualLoop") -> None:
        self.name = name
        self.is_dead = False
        self._loop = loop
        self._is_frozen = False
        self._held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(_PARTY.set, self)

    @property
    def is_running(self) -> bool:
        """Neither frozen nor dead."""
        return not (self._is_frozen or self.is_dead)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine in this process."""
        return self._loop.create_task(work, context=self.context.copy())

    def freeze(self) -> None:
        """Run nothing of it any more."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Go on where it stopped."""
        self._is_frozen = False
        held, self._held = self._held, []
        self._loop.put_back(held)

    def hold(self, handle: asyncio.Handle) -> bool:
        """Keep a callback until later if the party is frozen."""
        if self._is_frozen:
            self._held.append(handle)
        return self._is_frozen


_PARTY: contextvars.ContextVar[Party | None] = contextvars.ContextVar("party", default=None)


def current_party() -> Party | None:
    """Whose callback is running."""
    return _PARTY.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs until there is nothing to do at this moment, then jumps to the next.

    Args:
        rng: draws which of the callbacks that are ready runs next.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._ready: list[asyncio.Handle] = []
        self._now_s = 0.0
        self._random = rng.random
        self.num_callbacks = 0

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now_s

    def put_back(self, handles: list[asyncio.Handle]) -> None:
        """Callbacks that were held are ready."""
        self._ready += handles

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise NothingLeft
            self._now_s = max(self._now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        if not ready:
            return
        index = int(self._random() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        handle = ready.pop()
        if handle._cancelled:
            return
        party = handle._context.get(_PARTY)  # type: ignore[attr-defined]
        if party is None or not party.hold(handle):
            self.num_callbacks += 1
            handle._run()

    def _process_events(self, event_list: object) -> None:
        raise NotImplementedError("there is no selector")

    def _write_to_self(self) -> None:
        pass
