"""Stretches of a recording, as an engine's logs would show them. Reads the file frame by frame."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler_svc.past.stretch import StretchLogs
from scheduler_svc.recording import EntryFrame, EpochFrame, Frame, PlanFrame, read_frames
from scheduler_svc.replay import Replay
from shared.bus.api import Entry, EntryId
from shared.codec import decode_as, encode
from shared.errors import PageStreamError
from shared.messages.plans import EpochStarted, StepPlan

_MOST_PLANS = 4_000
_MOST_OUTPUTS = 6_000
_MOST_BYTES = 24 << 20  # of all entries of a stretch
_SNAPSHOT_MS = 5_000  # between snapshots, which correct what plans do not show
# What a damaged file may raise where it is read and replayed.
_DAMAGE = (PageStreamError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def span_of(path: Path, is_late: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """First and last moment of a recording, by the engine's clock.

    Returns:
        ``first_ms``, ``last_ms`` and ``is_damaged``: it cannot be read beyond them. Empty if there
        is no plan before the damage; None if reading it took too long.

    Raises:
        OSError: the file cannot be read.
    """
    first_ms = last_ms = 0
    last: bytes | None = None
    is_damaged = False
    try:
        for frame in read_frames(path):
            if is_late():
                return None
            if isinstance(frame, EpochFrame):
                first_ms = first_ms or frame.fence.epoch
            elif isinstance(frame, PlanFrame):
                last = frame.plan
    except _DAMAGE:
        is_damaged = True
    try:
        last_ms = 0 if last is None else decode_as(StepPlan, last).now_ms
    except _DAMAGE:
        is_damaged = True
    if not first_ms or last is None:
        return {}
    return {
        "first_ms": first_ms,
        "last_ms": max(first_ms + 1, last_ms),
        "is_damaged": is_damaged,
    }


def recorded_stretch(path: Path, since_ms: int, until_ms: int) -> tuple[StretchLogs, str]:
    """The stretch of a recording, with snapshots from a replay; what cannot be replayed ends it.

    Returns:
        The entries, and why they end early; "" if they do not.

    Raises:
        ValueError: nothing of the stretch can be replayed.
        OSError: the file cannot be read.
    """
    found = _Stretch(since_ms, until_ms)
    try:
        for frame in _from_epoch(path, since_ms):
            if not found.take(frame):
                break
        found.end()
    # The errors themselves show parts of plans, and so of prompts.
    except _DAMAGE:
        problem = f"the recording cannot be replayed behind step {found.step}: it is damaged, or "
        problem += "another version of the scheduler made it"
        if not found.snapshots:
            raise ValueError(problem) from None
        return found.logs, problem
    return found.logs, ""


def _from_epoch(path: Path, since_ms: int) -> Iterator[Frame]:
    """The frames from the last epoch on that began before a moment, or from the first."""
    number = -1
    try:
        for frame in read_frames(path):
            if isinstance(frame, EpochFrame):
                if number >= 0 and frame.fence.epoch > since_ms:
                    break
                number += 1
    except _DAMAGE:
        pass  # it is found once more where it matters
    for frame in read_frames(path):
        number -= isinstance(frame, EpochFrame)
        if number < 0:
            yield frame


class _Stretch:
    """Collects the entries of a stretch while its epochs are replayed.

    Attributes:
        step: of the last plan that was replayed.
        snapshots: the first one is the state at the start of the stretch.
    """

    def __init__(self, since_ms: int, until_ms: int) -> None:
        self.step = 0
        self.snapshots: list[Entry] = []
        self._since_ms = since_ms
        self._until_ms = until_ms
        self._replay: Replay | None = None
        self._epoch = 0
        self._now_ms = 0  # of the last plan
        self._snapshot_ms = 0
        self._plans: list[Entry] = []
        self._outputs: deque[Entry] = deque()
        self._bytes_left = _MOST_BYTES
        self._is_over = False  # all plans are there; outputs show how requests went on

    @property
    def logs(self) -> StretchLogs:
        """What was collected."""
        return StretchLogs(self.snapshots, self._plans, list(self._outputs))

    def take(self, frame: Frame) -> bool:
        """Take the next frame; False if no other is needed."""
        match frame:
            case EpochFrame():
                if self._is_over:
                    return False
                self._begin(frame)
            case EntryFrame() if self._replay is not None:
                if not self._is_over:
                    self._replay.add(frame)
                if frame.log == "outputs":
                    self._outputs.append(frame.entry)
                    self._bytes_left -= frame.entry.num_bytes if self.snapshots else 0
            case PlanFrame() if self._replay is not None:
                if not self._is_over:
                    self._plan(self._replay, frame.plan)
            case _:
                raise ValueError("the recording does not begin with an epoch")
        if self.snapshots and (len(self._plans) >= _MOST_PLANS or self._bytes_left <= 0):
            self._is_over = True
        is_full = len(self._outputs) >= _MOST_OUTPUTS or self._bytes_left <= 0
        return not (self._is_over and is_full)

    def end(self) -> None:
        """The file has ended, or enough was taken."""
        if self._replay is None:
            raise ValueError("the recording is empty")
        if not self._is_over:
            self._snapshot(self._replay)

    def _begin(self, frame: EpochFrame) -> None:
        self._replay = Replay(frame)
        self._epoch = self._now_ms = frame.fence.epoch
        self.step = 0
        if self.snapshots:
            started = EpochStarted(self._epoch, "", ())  # a recording does not tell the parties
            self._outputs.append(Entry(frame.fence, (encode(started),)))
            self._snapshot(self._replay)

    def _plan(self, replay: Replay, data: bytes) -> None:
        plan: StepPlan = decode_as(StepPlan, data)
        if plan.now_ms > self._since_ms and not self.snapshots:
            self._snapshot(replay)
        plan = replay.plan(data)
        replay.core.take_events()
        self.step, self._now_ms = plan.step, max(self._now_ms, plan.now_ms)
        if not self.snapshots:
            cursor = EntryId.parse(plan.outputs_cursor)
            while self._outputs and self._outputs[0].id <= cursor:
                self._outputs.popleft()
            return
        self._plans.append(Entry(EntryId(self._epoch, plan.step), (encode(plan),)))
        self._bytes_left -= len(data)
        if plan.now_ms > self._until_ms:
            self._is_over = True
        elif plan.now_ms - self._snapshot_ms >= _SNAPSHOT_MS:
            self._snapshot(replay)

    def _snapshot(self, replay: Replay) -> None:
        """Write what the scheduler would have written to ``snapshots``."""
        at = EntryId(self._epoch, max(1, self._now_ms - self._epoch))
        data = encode(replay.core.snapshot())
        self.snapshots.append(Entry(at, (data,)))
        self._snapshot_ms = self._now_ms
        self._bytes_left -= len(data)
