"""Reads the outputs log and turns entries into events."""

from collections.abc import Iterator

from shared.bus.api import Entry, EntryId
from shared.codec import Message, decode
from shared.errors import DecodeError
from shared.messages.checks import check
from shared.messages.endings import EndFlag
from shared.messages.outputs import OutputsMessage, RequestState, StepResult
from shared.messages.plans import EpochStarted
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step
from shared.outputs_log.position import Continuity, LogPosition


def requests_cursor_of(message: Message) -> EntryId | None:
    """The last entry of ``requests`` that a message of ``outputs`` reflects; None if it has none.

    Raises:
        ValueError: the cursor is no entry id.
    """
    return EntryId.parse(message.requests_cursor) if isinstance(message, OutputsMessage) else None


def check_output(at: EntryId, message: Message, vocab_size: int = 0) -> None:
    """Check a message that was read from ``outputs``.

    Args:
        at: id of its entry.
        vocab_size: of the model; 0: any token is valid.

    Raises:
        DecodeError: it is inconsistent, or belongs in another log.
    """
    if isinstance(message, EpochStarted):
        if message.epoch != at.epoch:
            raise DecodeError(f"entry {at} starts epoch {message.epoch}")
    elif isinstance(message, StepResult):
        check(message, vocab_size)
        if len(set(message.handles.tolist())) < len(message.handles):
            raise DecodeError(f"step {message.step}: two tokens for one sequence")
    elif isinstance(message, OutputsMessage):
        check(message, vocab_size)
    else:
        raise DecodeError(f"{type(message).__name__} does not belong into outputs")


class OutputsReader:
    """One reader of one outputs log. It does no I/O.

    A message that is repeated, or of an epoch that is over, gives no event. A missing message gives
    a Gap, one that cannot be decoded a Damaged.

    Args:
        vocab_size: of the model; 0: any token is valid.

    Attributes:
        position: how far the log was read.
        requests_cursor: entries of the requests log up to here are reflected in ``outputs``; None
            if this epoch has not shown it yet.
    """

    def __init__(self, vocab_size: int = 0) -> None:
        self.position = LogPosition()
        self.requests_cursor: EntryId | None = None
        self._vocab_size = vocab_size

    def read(self, entry: Entry) -> Iterator[OutputsEvent]:
        """Events of the next entry.

        This is a generator: a call such as ``position.await_epoch`` after an event applies to the
        next message of the same entry already.
        """
        self.position.read(entry.id)
        for data in entry.messages:
            try:
                message = decode(data)
            except DecodeError as error:
                yield Damaged(entry.id, str(error))
                continue
            yield from self._events(entry.id, message)

    def read_message(self, at: EntryId, message: Message) -> Iterator[OutputsEvent]:
        """Events of the next message, which was decoded already, of the entry with this id."""
        if at != self.position.cursor:
            self.position.read(at)
        yield from self._events(at, message)

    def log_deleted(self) -> None:
        """The log was deleted: read it from its start."""
        self.requests_cursor = None
        self.position.log_deleted()

    def server_restarted(self, last: EntryId) -> None:
        """The server was restarted and may have lost the end of the log.

        Args:
            last: last entry of the log now.
        """
        self.requests_cursor = None
        self.position.server_restarted(last)

    def _events(self, at: EntryId, message: Message) -> Iterator[OutputsEvent]:
        try:
            check_output(at, message, self._vocab_size)
        except DecodeError as error:
            yield Damaged(at, str(error))
            return
        position = self.position
        if isinstance(message, EpochStarted):
            if position.start_epoch(message.epoch, message.nonce):
                # The new scheduler may have read less of the requests log than the one before.
                self.requests_cursor = None
                yield message
            return
        continuity = position.enter(at.epoch)
        if continuity is Continuity.PASSED:
            return
        if continuity is Continuity.GAP:
            yield Gap("entries are missing in the log")
        if isinstance(message, StepResult):
            yield from self._step(message)
        elif isinstance(message, OutputsMessage):
            self.requests_cursor = requests_cursor_of(message)
            if isinstance(message, RequestState):
                position.read_state(message.step)
            yield message

    def _step(self, result: StepResult) -> Iterator[OutputsEvent]:
        expected = self.position.next_step
        continuity = self.position.take_step(result.step)
        if continuity is Continuity.PASSED:
            return
        if continuity is Continuity.GAP:
            missing = None if expected is None else (expected, result.step)
            yield Gap("results are missing in the log", missing)
        ends = zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=True)
        yield Step(
            result,
            result.handles.tolist(),
            result.tokens.tolist(),
            {row: EndFlag(flag).finish_reason() for row, flag in ends},
        )
