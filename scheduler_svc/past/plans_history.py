"""How far readers of an engine's past can go back: plans that are kept, and snapshots between them.

A plan is the difference to the one before. So the pool and the requests at some moment are those of
the last snapshot before it, with the plans and results that follow.
"""

from collections import deque
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode_as, encode
from shared.errors import DecodeError
from shared.messages.snapshots import PoolSnapshot

_EVERY_S = 5.0  # while plans are made; a snapshot of 4,096 blocks has some 20 KiB
_PAGE = 1_000  # entries per read


class PlansHistory:
    """Plans and snapshots in the log, with their sizes.

    Args:
        most_plans: that are kept after their results; 0: none, and there are no snapshots.
        most_bytes: of them, and of the snapshots.
        clock_s: monotonic time.
    """

    def __init__(
        self, keys: EngineKeys, most_plans: int, most_bytes: int, clock_s: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._most_plans = most_plans
        self._most_bytes = most_bytes
        self._clock_s = clock_s
        self._plans: deque[tuple[EntryId, int]] = deque()
        self._plan_bytes = 0
        # With the first plan that each one needs to be of use.
        self._snapshots: deque[tuple[EntryId, EntryId, int]] = deque()
        self._snapshot_bytes = 0
        self._taken_s = float("-inf")
        self._taken: tuple[int, ...] | None = None  # the state that the last snapshot shows

    async def load(self, bus: Bus) -> None:
        """Take over what earlier instances of the scheduler have left."""
        if not self._most_plans:
            return
        for log in (self._keys.plans, self._keys.snapshots):
            cursor = START
            while entries := (await bus.read({log: cursor}, 0, _PAGE)).get(log):
                cursor = entries[-1].id
                for entry in entries:
                    if log == self._keys.plans:
                        self.planned(entry.id, entry.num_bytes)
                    else:
                        self._add_snapshot(entry.id, _step_of(entry.messages[0]), entry.num_bytes)

    def planned(self, at: EntryId, num_bytes: int) -> None:
        """Count a plan that is about to be appended."""
        if not self._most_plans:
            return
        self._plans.append((at, num_bytes))
        self._plan_bytes += num_bytes
        while len(self._plans) > self._most_plans or self._plan_bytes > self._most_bytes:
            self._plan_bytes -= self._plans.popleft()[1]

    def plans_min_id(self, applied: EntryId) -> EntryId:
        """Plans below may be trimmed.

        Args:
            applied: the last plan whose result was read.
        """
        return min(applied, self._plans[0][0]) if self._plans else applied

    def forget_plans(self) -> None:
        """Let the next plan trim all others: memory is short."""
        self._plans.clear()
        self._plan_bytes = 0

    def snapshot(self, core: Scheduler, epoch: int, now_ms: int) -> Append | None:
        """A snapshot to append, if one is due.

        Args:
            now_ms: the engine's clock.
        """
        now_s = self._clock_s()
        is_pause = not core.has_running  # the end of it all is shown as soon as it is there
        if not self._most_plans or (now_s - self._taken_s < _EVERY_S and not is_pause):
            return None
        changes = (core.planned_step, core.applied_step, core.pool.num_changes, core.num_requests)
        state = (epoch, *changes)
        if state == self._taken:
            return None
        self._taken, self._taken_s = state, now_s
        data = encode(core.snapshot())
        at = EntryId(epoch, max(1, now_ms - epoch))
        if self._snapshots and at <= (last := self._snapshots[-1][0]):
            at = EntryId(last.epoch, last.seq + 1)
        self._add_snapshot(at, core.planned_step, len(data))
        below = self._snapshots[0][0]
        return Append(self._keys.snapshots, [data], at.epoch, at.seq, below)

    def _add_snapshot(self, at: EntryId, step: int, num_bytes: int) -> None:
        found = self._snapshots
        found.append((at, EntryId(at.epoch, step + 1), num_bytes))
        self._snapshot_bytes += num_bytes
        first_plan = self._plans[0][0] if self._plans else START
        while len(found) > 1 and (
            self._snapshot_bytes > self._most_bytes or found[0][1] < first_plan
        ):
            self._snapshot_bytes -= found.popleft()[2]


def _step_of(data: bytes) -> int:
    try:
        snapshot: PoolSnapshot = decode_as(PoolSnapshot, data)
    except DecodeError:
        return 0  # of another version; it is trimmed as if it were the oldest
    return snapshot.step
