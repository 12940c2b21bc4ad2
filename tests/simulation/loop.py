"""An event loop in which only the seed decides: virtual time, callbacks in a drawn order.

Every callback belongs to the party in whose context it was scheduled. A party that is frozen is
not run: what would be its turn is held until it is thawed, if ever. So a pause is what SIGSTOP
does, and a crash is a pause without end: nothing is cleaned up.

It has what coroutines of the services ask of a loop, and nothing else: no sockets, no threads, no
selector. A run is some hundred callbacks, and a million runs are to end.
"""

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


class NothingLeft(RuntimeError):
    """No callback is ready and none is scheduled: nothing will ever happen."""


class Turn:
    """A callback, as asyncio's handles are."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not run it."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Whether it will not be run."""
        return self.is_cancelled


class Party:
    """One process.

    Attributes:
        is_dead: it will never be thawed.
        number: of the parties of a run, which one it is.
    """

    def __init__(self, name: str, number: int, loop: "VirtualLoop") -> None:
        self.name = name
        self.role = name.partition("-")[0]
        self.number = number
        self.is_dead = False
        self.is_frozen = False
        self.held: list[Turn] = []
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(_PARTY.set, self)

    @property
    def is_running(self) -> bool:
        """Neither frozen nor dead."""
        return not (self.is_frozen or self.is_dead)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine in this process."""
        return self._loop.create_task(work, context=self.context.copy())

    def freeze(self) -> None:
        """Run nothing of it any more."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Go on where it stopped."""
        self.is_frozen = False
        held, self.held = self.held, []
        self._loop.put_back(held)


_PARTY: contextvars.ContextVar[Party | None] = contextvars.ContextVar("party", default=None)


def current_party() -> Party | None:
    """Whose callback is running."""
    return _PARTY.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs until there is nothing to do at this moment, then jumps to the next.

    Args:
        rng: draws which of the callbacks that are ready runs next.

    Attributes:
        order: 64-bit hash of whose callbacks ran, in their order, and of what was mixed in.
    """

    def __init__(self, rng: Random) -> None:
        self.num_callbacks = 0
        self.order = 0
        self._ready: list[Turn] = []
        # (when, number, what): a callback, or a future that has a result then
        self._timers: list[tuple[float, int, Turn | asyncio.Future[None]]] = []
        self._num_timers = 0
        self._now_s = 0.0
        self._random = rng.random
        self._tasks: dict[asyncio.Task[Any], None] = {}

    # -------------------------------------------------- what asyncio asks of it

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=str(name), context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        turn = Turn(callback, args, context or contextvars.copy_context())
        self._ready.append(turn)
        return turn

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        turn = Turn(callback, args, context or contextvars.copy_context())
        self._push(when, turn)
        return turn

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)

    # ---------------------------------------------------------- what it can do

    def wake_at(self, when_s: float, future: "asyncio.Future[None]") -> None:
        """Give the future a result at this moment, unless it has one by then."""
        self._push(when_s, future)

    async def sleep(self, seconds: float) -> None:
        """As asyncio's, in one callback instead of two."""
        future = asyncio.Future[None](loop=self)
        self._push(self._now_s + seconds, future)
        await future

    def put_back(self, turns: list[Turn]) -> None:
        """Callbacks that were held are ready."""
        self._ready += turns

    def mix(self, number: int) -> None:
        """Count something else as part of the order."""
        self.order = (self.order ^ number) * _PRIME & _MASK

    def run_until_done(self, task: "asyncio.Task[Any]") -> None:
        """Run all there is until this task is done.

        Raises:
            NothingLeft: it will never be.
        """
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._run_one()
        finally:
            asyncio._set_running_loop(before)

    def cancel_all(self) -> None:
        """End all tasks."""
        for task in list(self._tasks):
            task.cancel()

        async def last() -> None:
            while len(self._tasks) > 1:
                await self.sleep(0.0)

        self.run_until_done(self.create_task(last()))

    # ----------------------------------------------------------------- turns

    def _run_one(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        count = len(ready)
        if count > 1:
            index = int(self._random() * count)
            ready[index], ready[-1] = ready[-1], ready[index]
        turn = ready.pop()
        if turn.is_cancelled:
            return
        party = turn.context.get(_PARTY)
        if party is not None:
            if party.is_frozen:
                party.held.append(turn)
                return
            self.order = (self.order ^ party.number) * _PRIME & _MASK
        self.num_callbacks += 1
        turn.context.run(turn.callback, *turn.args)

    def _jump(self) -> None:
        """On to the next moment at which something is ready."""
        timers, ready = self._timers, self._ready
        while not ready:
            if not timers:
                raise NothingLeft
            when, _, what = heapq.heappop(timers)
            while True:
                if isinstance(what, Turn):
                    if not what.is_cancelled:
                        self._now_s = max(self._now_s, when)
                        ready.append(what)
                elif not what.done():
                    self._now_s = max(self._now_s, when)
                    what.set_result(None)
                if not timers or timers[0][0] > self._now_s:
                    break
                when, _, what = heapq.heappop(timers)

    def _push(self, when: float, what: "Turn | asyncio.Future[None]") -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, what))

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)
