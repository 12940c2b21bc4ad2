"""Brings plans, outputs and snapshots into their order, and keeps an engine's view from them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from shared.bus.api import Entry, EntryId
from shared.codec import Message, decode
from shared.engine_view.engine_view import EngineView
from shared.errors import DecodeError
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.snapshots import PoolSnapshot
from shared.outputs_log.events import Damaged, Gap, Step
from shared.outputs_log.reader import OutputsReader

_MOST_HELD = 20_000  # entries while no snapshot comes
_M = TypeVar("_M", bound=Message)


class _Output(NamedTuple):
    """An entry of outputs.

    Attributes:
        messages: None if one of them could not be decoded.
        step: of the result in it; 0: it has none.
    """

    id: EntryId
    messages: Sequence[Message] | None
    step: int


class LogFollower:
    """Reads the three logs of one engine. It does no I/O.

    A view begins at a snapshot. After a new epoch or a gap the next snapshot is awaited; the view
    stays as it was until then.

    Args:
        number_of: the number that stands for a request's id.

    Attributes:
        view: None before the first snapshot.
    """

    def __init__(self, number_of: Callable[[str], int]) -> None:
        self._number_of = number_of
        self.view: EngineView | None = None
        self._reader = OutputsReader()
        self._plans: deque[tuple[EntryId, StepPlan]] = deque()
        self._outputs: deque[_Output] = deque()
        self._outputs_read = EntryId(0, 0)
        self._awaits: int | None = 0  # a snapshot of this epoch or a later one; None: none
        self._parties: EpochStarted | None = None
        self._is_fresh = True  # no result was read since the last snapshot that was begun at

    def begin(self, entry: Entry) -> tuple[EntryId, EntryId] | None:
        """Begin at an entry of ``snapshots``.

        Returns:
            The cursors from which plans and outputs are to be read; None if it is unreadable.
        """
        snapshot = _decoded(entry, PoolSnapshot)
        if snapshot is None:
            return None
        self._restore(entry.id, snapshot)
        return EntryId(entry.id.epoch, snapshot.step), EntryId.parse(snapshot.outputs_cursor)

    def read(
        self, plans: Iterable[Entry], outputs: Iterable[Entry], snapshots: Iterable[Entry]
    ) -> None:
        """Take the next entries of each log, which were read together."""
        for entry in plans:
            plan = _decoded(entry, StepPlan)
            if plan is not None:
                self._plans.append((entry.id, plan))
        for entry in outputs:
            self._outputs.append(_output(entry))
            self._outputs_read = entry.id
        self._proceed()
        for entry in snapshots:
            snapshot = _decoded(entry, PoolSnapshot)
            if snapshot is not None:
                self._take_snapshot(entry.id, snapshot)
        self._proceed()
        if self._awaits is not None and len(self._outputs) + len(self._plans) > _MOST_HELD:
            self._outputs.clear()
            self._plans.clear()

    def _take_snapshot(self, at: EntryId, snapshot: PoolSnapshot) -> None:
        if self._awaits is not None:
            if at.epoch >= self._awaits:
                self._restore(at, snapshot)
        elif self.view is not None and at.epoch == self.view.epoch:
            self.view.correct(snapshot)

    def _restore(self, at: EntryId, snapshot: PoolSnapshot) -> None:
        before = self.view
        self.view = EngineView(self._number_of, snapshot, at)
        if before is not None:
            self.view.continue_from(before)
        self._awaits, self._is_fresh = None, True
        self._reader = OutputsReader()
        cursor = EntryId.parse(snapshot.outputs_cursor)
        while self._plans and self._plans[0][0] <= EntryId(at.epoch, snapshot.step):
            self._plans.popleft()
        while self._outputs and self._outputs[0].id <= cursor:
            self._outputs.popleft()
        self._outputs_read = max(self._outputs_read, cursor)

    def _proceed(self) -> None:
        """Apply what can be applied; a plan waits for the outputs that it was made after."""
        while self._awaits is None and self.view is not None:
            if self._plans:
                at, plan = self._plans[0]
                cursor = EntryId.parse(plan.outputs_cursor)
                if at.epoch == self.view.epoch and cursor <= self._outputs_read:
                    self._apply_outputs(cursor)
                    if self._awaits is None:
                        if not self._has_requests_of(at, plan):
                            return
                        self._plans.popleft()
                        self._apply_plan(at, plan)
                    continue
                if at.epoch < self.view.epoch:
                    self._plans.popleft()
                    continue
            # Behind the last plan that can be applied: results of those before it.
            if not self._apply_outputs(None):
                return

    def _has_requests_of(self, at: EntryId, plan: StepPlan) -> bool:
        """Apply the states of requests that a plan admits, if they are behind its cursor.

        The scheduler appends them before the plan, and makes that without having read them.

        Returns:
            False: a state may follow that was not read so far.
        """
        assert self.view is not None
        unknown = {
            admission.handle
            for admission in plan.admissions
            if not self.view.has_request_of(admission)
        }
        if not unknown:
            return True
        is_complete = False  # all is read that was appended before the plan was executed
        for entry in self._outputs:
            is_complete |= entry.step >= plan.step or entry.id.epoch > at.epoch
            if is_complete:
                break
            for message in entry.messages or ():
                if isinstance(message, RequestState):
                    handles = {choice.handle for choice in message.choices}
                    if not unknown.isdisjoint(handles):
                        self.view.apply(message)
                        unknown -= handles
        return is_complete or not unknown

    def _apply_plan(self, at: EntryId, plan: StepPlan) -> None:
        view = self.view
        assert view is not None
        if plan.step > view.step + 1:
            self._awaits = at.epoch  # plans between were trimmed
        elif plan.step == view.step + 1:
            view.plan(plan)

    def _apply_outputs(self, until: EntryId | None) -> bool:
        """Apply entries up to an id, or those that need no plan that is missing; whether any."""
        found = False
        while self._outputs and self._awaits is None:
            entry = self._outputs[0]
            if until is not None and entry.id > until:
                break
            if until is None and self._is_early(entry):
                break
            self._outputs.popleft()
            self._apply_entry(entry)
            found = True
        return found

    def _is_early(self, entry: _Output) -> bool:
        """Whether it has the result of a plan that was not applied, or is of a later epoch."""
        assert self.view is not None
        if entry.id.epoch > self.view.epoch:
            return bool(self._plans) and self._plans[0][0].epoch == self.view.epoch
        return entry.step > self.view.step

    def _apply_entry(self, entry: _Output) -> None:
        view = self.view
        assert view is not None
        if entry.messages is None:
            self._awaits = entry.id.epoch
            return
        for message in entry.messages:
            for event in self._reader.read_message(entry.id, message):
                if isinstance(event, EpochStarted):
                    if event.epoch > view.epoch:
                        view.mark_epoch(self._parties, event)
                        self._awaits = event.epoch
                    self._parties = event
                elif isinstance(event, Gap | Damaged):
                    if not self._is_fresh:
                        self._awaits = entry.id.epoch
                elif self._awaits is None:
                    self._is_fresh = self._is_fresh and not isinstance(event, Step)
                    view.apply(event)


def _output(entry: Entry) -> _Output:
    try:
        messages = [decode(data) for data in entry.messages]
    except DecodeError:
        return _Output(entry.id, None, 0)
    steps = [found.step for found in messages if isinstance(found, StepResult)]
    return _Output(entry.id, messages, max(steps, default=0))


def _decoded(entry: Entry, cls: type[_M]) -> _M | None:
    """The entry's message of this class, which is alone in it; None if it is another one."""
    try:
        message = decode(entry.messages[0])
    except DecodeError:
        return None
    return message if isinstance(message, cls) else None
