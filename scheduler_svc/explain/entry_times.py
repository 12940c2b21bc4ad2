"""When an entry of ``outputs`` was written: its id says only in which epoch."""

from bisect import bisect_left
from collections.abc import Iterable

from scheduler_svc.explain.timeline import When
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan, Tick


class Clock:
    """Moments of entries, in the order of the log.

    A plan has a time, and the entries that the scheduler had read by then. Where no plan is left,
    the time is at least that of what is known to have come before: an epoch's start, a request
    that was read, and the steps since then, one after the other.

    Args:
        plans: all that are left, earliest first.
    """

    def __init__(self, plans: Iterable[StepPlan]) -> None:
        ticks: list[Tick] = []
        for plan in plans:
            ticks += plan.idle_turns
            ticks.append(Tick(plan.now_ms, plan.requests_cursor, plan.outputs_cursor))
        self._outputs = [EntryId.parse(tick.outputs_cursor) for tick in ticks]
        self._requests = [EntryId.parse(tick.requests_cursor) for tick in ticks]
        self._times_ms = [tick.now_ms for tick in ticks]
        self._not_before_us = 0

    def read(self, at: EntryId, message: Message, requests_cursor: EntryId | None) -> When:
        """When the next message was written, or read by the scheduler."""
        if isinstance(message, EpochStarted):
            self._lift(message.epoch)
            return When(message.epoch)
        if isinstance(message, StepResult):
            self._not_before_us += message.step_us
        if requests_cursor is not None:
            self._lift(requests_cursor.epoch)
        if isinstance(message, RequestState) and requests_cursor is not None:
            # An answer is written in the tick that applies what it answers.
            turn_ms = self._turn_ms(self._requests, requests_cursor)
        else:
            turn_ms = self._turn_ms(self._outputs, at)
        if turn_ms is not None:
            self._lift(turn_ms)
            return When(self._not_before_us // 1_000)
        return When(self._not_before_us // 1_000, is_estimate=True)

    def planned(self, plan: StepPlan) -> None:
        """The scheduler made this plan before what is read next."""
        self._lift(plan.now_ms)

    def _turn_ms(self, cursors: list[EntryId], at: EntryId) -> int | None:
        """When the scheduler had first read this entry, if that is known."""
        index = bisect_left(cursors, at)
        # What came before the first tick that is left may be much older.
        return self._times_ms[index] if 0 < index < len(cursors) else None

    def _lift(self, at_ms: int) -> None:
        self._not_before_us = max(self._not_before_us, 1_000 * at_ms)
