"""The position of a reader in the outputs log, and whether the next message follows it."""

from enum import Enum, auto

from shared.bus.api import START, EntryId


class Continuity(Enum):
    """How a message relates to the messages that were read before it."""

    FOLLOWS = auto()
    PASSED = auto()  # repeated, or of an invalid epoch: it is ignored
    GAP = auto()  # something before it is missing


class LogPosition:
    """How far a reader has read, by entry, epoch and step.

    Ids of entries are dense within an epoch, and so are steps of results. So a missing entry is
    detected, although Redis skips trimmed entries silently.

    Attributes:
        cursor: last entry that was read.
    """

    def __init__(self) -> None:
        self.cursor: EntryId = START
        self._epoch: int | None = None
        self._nonce: str | None = None  # of the epoch's EpochStarted, if that was read
        self._step: int | None = None  # of the last result, None if not known
        self._stated_step: int | None = None  # while ``_step`` is not known: see ``read_state``
        self._awaits_above: int | None = None  # only later epochs are valid
        self._entries_missing = False  # in front of the entry at the cursor

    @property
    def next_step(self) -> int | None:
        """The step whose result should come next; None if not known."""
        before = self._stated_step if self._step is None else self._step
        return None if before is None else before + 1

    def read(self, entry_id: EntryId) -> None:
        """Move to the next entry that Redis returned."""
        before, self.cursor = self.cursor, entry_id
        if entry_id.epoch != before.epoch:
            self._entries_missing = entry_id.seq > 0
        elif entry_id.seq > before.seq + 1:
            self._entries_missing = True

    def start_epoch(self, epoch: int, nonce: str) -> bool:
        """Begin an epoch; False if it began before or is over.

        Args:
            nonce: of this EpochStarted. A server whose clock went back after it had lost the end of
                the log gives the number of a lost epoch to the next one.
        """
        is_same = epoch == self._epoch and nonce == self._nonce
        if is_same or (self._epoch is not None and epoch < self._epoch):
            return False
        self._epoch, self._nonce, self._awaits_above = epoch, nonce, None
        self._step, self._stated_step, self._entries_missing = 0, None, False
        return True

    def await_epoch(self) -> None:
        """Pass everything until an epoch begins that is later than that of the cursor."""
        epoch, awaited = self.cursor.epoch, self._awaits_above
        self._awaits_above = epoch if awaited is None else max(awaited, epoch)

    def enter(self, epoch: int) -> Continuity:
        """Take a message of this epoch, other than its EpochStarted."""
        awaits_above, is_awaited = self._awaits_above, False
        if awaits_above is not None:
            if epoch <= awaits_above:
                return Continuity.PASSED
            # Its EpochStarted was trimmed before this could be read.
            self._awaits_above, is_awaited = None, True
        if self._epoch is not None and epoch < self._epoch:
            return Continuity.PASSED
        before, self._epoch = self._epoch, epoch
        if before != epoch:
            self._nonce = None
        entries_missing, self._entries_missing = self._entries_missing, False
        if not entries_missing and not is_awaited and (before is None or before == epoch):
            return Continuity.FOLLOWS
        self._forget_step()
        return Continuity.GAP

    def read_state(self, step: int) -> None:
        """Take a RequestState, which includes the tokens of its request up to this step.

        If no result was read yet, the next result follows the earliest of these steps.
        """
        if self._step is None:
            stated = self._stated_step
            self._stated_step = step if stated is None else min(stated, step)

    def take_step(self, step: int) -> Continuity:
        """Take the result of this step."""
        if self._step is not None and step <= self._step:
            return Continuity.PASSED
        expected = self.next_step
        self._step, self._stated_step = step, None
        is_next = expected is not None and step <= expected
        return Continuity.FOLLOWS if is_next else Continuity.GAP

    def log_deleted(self) -> None:
        """Start over: the log begins anew, in the current epoch or a later one."""
        self.cursor = START
        self._forget_step()

    def server_restarted(self, last: EntryId) -> None:
        """Adapt to a restart of the server; ``last`` is the log's last entry now."""
        # The next result may follow other results than those that were read.
        self._forget_step()
        if last < self.cursor:
            # The end of the log is lost. Ids below the cursor will be given out again, to other
            # messages than those that were read: none is valid before the next epoch.
            self.cursor = START
            self._awaits_above = last.epoch
        if self._epoch is not None and last.epoch < self._epoch:
            # Its epoch is lost as a whole, perhaps by a restart after the one that was noticed. If
            # the clock went back, too, the next has a lower number, and may be the one that is
            # there already, without its start.
            self._epoch = self._nonce = self._awaits_above = None

    def _forget_step(self) -> None:
        self._step = self._stated_step = None
