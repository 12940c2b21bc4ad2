"""When an entry of ``outputs`` was written: its id says only in which epoch."""

from bisect import bisect_left
from collections.abc import Iterable

from scheduler_svc.explain.story import When
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages import EpochStarted, StepPlan, StepResult


class Clock:
    """Moments of entries, in the order of the log.

    A plan says what the scheduler had read at which time. Where no plan is left, the time is at
    least that of what is known to have come before: an epoch's start, a request that was
    read, and the steps since then, one after the other.

    Args:
        plans: all that are left, earliest first.
    """

    def __init__(self, plans: Iterable[StepPlan]) -> None:
        turns: list[tuple[EntryId, int]] = []
        for plan in plans:
            turns += [(EntryId.parse(t.outputs_cursor), t.now_ms) for t in plan.idle_turns]
            turns.append((EntryId.parse(plan.outputs_cursor), plan.now_ms))
        turns.sort()
        self._cursors = [cursor for cursor, _ in turns]
        self._times_ms = [now_ms for _, now_ms in turns]
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
        index = bisect_left(self._cursors, at)
        # What came before the first turn that is left may be much older.
        if 0 < index < len(self._cursors):
            self._lift(self._times_ms[index])
            return When(self._times_ms[index])
        return When(self._not_before_us // 1_000, is_estimate=True)

    def planned(self, plan: StepPlan) -> None:
        """The scheduler made this plan before what is read next."""
        self._lift(plan.now_ms)

    def _lift(self, at_ms: int) -> None:
        self._not_before_us = max(self._not_before_us, 1_000 * at_ms)
