"""How far one log was read, and whether what comes next follows without a gap."""

from enum import Enum, auto

from shared.bus.api import START, EntryId


class Fit(Enum):
    """How something stands to what was read before it."""

    FOLLOWS = auto()
    PASSED = auto()  # it is of no interest any more, or not yet
    GAP = auto()  # something between is missing


class Place:
    """A reader's place in the outputs log.

    Attributes:
        cursor: last entry that was read.
    """

    def __init__(self) -> None:
        self.cursor: EntryId = START
        self._epoch: int | None = None
        self._nonce: str | None = None  # of the epoch's start, if that was read
        self._step: int | None = None  # None: not known, so that whatever comes next is a gap
        self._awaits_above: int | None = None  # believe nothing but what is of a later epoch
        self._is_torn = False

    def read(self, entry_id: EntryId) -> None:
        """The next entry; those of an epoch are dense, so that one that was trimmed is noticed."""
        before, self.cursor = self.cursor, entry_id
        if entry_id.epoch != before.epoch:
            self._is_torn = entry_id.seq > 0
        elif entry_id.seq > before.seq + 1:
            self._is_torn = True

    def start_epoch(self, epoch: int, nonce: str) -> bool:
        """A scheduler took over; False if that is old news.

        Args:
            nonce: of this beginning. A server whose clock went back after it had lost the end of
                the log gives the number of a lost epoch to the next one.
        """
        is_same = epoch == self._epoch and nonce == self._nonce
        if is_same or (self._epoch is not None and epoch < self._epoch):
            return False
        self._epoch, self._nonce, self._step, self._awaits_above = epoch, nonce, 0, None
        self._is_torn = False
        return True

    def await_epoch(self) -> None:
        """Believe nothing until a scheduler has started anew."""
        self._awaits_above = self.cursor.epoch

    def enter(self, epoch: int) -> Fit:
        """What was read is of this epoch; its start is missing, or entries before this one."""
        awaits_above, is_awaited = self._awaits_above, False
        if awaits_above is not None:
            if epoch <= awaits_above:
                return Fit.PASSED
            # Its start was trimmed before this could be read.
            self._awaits_above, is_awaited = None, True
        if self._epoch is not None and epoch < self._epoch:
            return Fit.PASSED
        before, self._epoch = self._epoch, epoch
        if before != epoch:
            self._nonce = None
        is_torn, self._is_torn = self._is_torn, False
        if not is_torn and not is_awaited and (before is None or before == epoch):
            return Fit.FOLLOWS
        self._step = None
        return Fit.GAP

    def take_step(self, step: int) -> Fit:
        """A result was read; those of an epoch are dense."""
        before = self._step
        if before is not None and step <= before:
            return Fit.PASSED
        self._step = step
        return Fit.FOLLOWS if before is not None and step == before + 1 else Fit.GAP

    def log_deleted(self) -> None:
        """The log begins anew, written by the epoch that is under way or by later ones."""
        self.cursor, self._step = START, None

    def server_restarted(self, last: EntryId) -> None:
        """The server is not the one that was read so far; ``last`` is the log's last entry now."""
        # What comes next may follow other results than those that were read.
        self._step = None
        if last < self.cursor:
            # The end of the log is lost. Ids below the cursor will be given out again; what they
            # say is not what was delivered, until a scheduler has started anew.
            self.cursor = START
            self._awaits_above = last.epoch
        if self._epoch is not None and last.epoch < self._epoch:
            # Its epoch is lost as a whole, perhaps by a restart after the one that was noticed. If
            # the clock went back, too, the next has a lower number, and may be the one that is
            # there already, without its start.
            self._epoch = self._nonce = self._awaits_above = None
