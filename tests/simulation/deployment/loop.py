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
from collections.abc import Callable, Coroutine, Generator
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


class Sleep:
    """Awaited by one task: over after some time, or when it is ended.

    What asyncio takes for a future, without a callback between the moment and the task's turn.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_is_cancelled",
        "_is_over",
        "_loop",
        "_turn",
        "_until_s",
    )

    def __init__(self, loop: "VirtualLoop", until_s: float) -> None:
        self._asyncio_future_blocking = False
        self._is_cancelled = False
        self._is_over = False
        self._loop = loop
        self._until_s = until_s
        self._turn: Turn | None = None

    def __await__(self) -> Generator["Sleep", None, None]:
        self._asyncio_future_blocking = True
        yield self

    def end(self) -> None:
        """It is the task's turn."""
        turn = self._turn
        if turn is not None and not self._is_over:
            turn.is_cancelled = True
            self._turn = Turn(turn.callback, turn.args, turn.context)
            self._loop.put_back([self._turn])

    def get_loop(self) -> "VirtualLoop":
        return self._loop

    def add_done_callback(self, callback: Any, *, context: contextvars.Context) -> None:
        self._turn = Turn(callback, (self,), context)
        self._loop.push(self._until_s, self._turn)

    def cancel(self, msg: object = None) -> bool:
        self._is_cancelled = True
        self.end()
        return True

    def result(self) -> None:
        self._is_over = True
        if self._is_cancelled:
            raise asyncio.CancelledError


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
        self._timers: list[tuple[float, int, Turn]] = []  # the number orders what is due at once
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

    # Those of a loop are generic in their arguments; these take any.
    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        turn = Turn(callback, args, context or contextvars.copy_context())
        self._ready.append(turn)
        return turn

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        turn = Turn(callback, args, context or contextvars.copy_context())
        self.push(when, turn)
        return turn

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)

    # ---------------------------------------------------------- what it can do

    def sleep(self, seconds: float) -> Sleep:
        """To be awaited; as asyncio's, at half the price."""
        return Sleep(self, self._now_s + seconds)

    def push(self, when_s: float, turn: Turn) -> None:
        """Its turn is then."""
        self._num_timers += 1
        heapq.heappush(self._timers, (when_s, self._num_timers, turn))

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
            when_s, _, turn = heapq.heappop(timers)
            if turn.is_cancelled:
                continue
            ready.append(turn)
            if when_s > self._now_s:
                self._now_s = when_s
        while timers and timers[0][0] <= self._now_s:
            turn = heapq.heappop(timers)[2]
            if not turn.is_cancelled:
                ready.append(turn)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)
