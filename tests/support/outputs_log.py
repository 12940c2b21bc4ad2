"""Reads messages as if they stood in an outputs log, one entry each."""

from collections.abc import Iterable, Iterator

from scheduler_svc.recovery import Recovery
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.plans import EpochStarted
from shared.outputs_log.events import OutputsEvent
from shared.outputs_log.reader import OutputsReader


def events_of(
    messages: Iterable[Message], epoch: int = 5, vocab_size: int = 0
) -> Iterator[OutputsEvent]:
    """Events of all messages; an EpochStarted has the first id of its epoch.

    Args:
        epoch: of what comes before the first EpochStarted.
    """
    reader, seq = OutputsReader(vocab_size), -1
    for message in messages:
        seq += 1
        if isinstance(message, EpochStarted) and message.epoch > epoch:
            epoch, seq = message.epoch, 0
        yield from reader.read_message(EntryId(epoch, seq), message)


def recovered(
    messages: Iterable[Message], max_model_len: int = 100, epoch: int = 0, vocab_size: int = 0
) -> Recovery:
    """What a scheduler that starts behind these messages knows."""
    recovery = Recovery(max_model_len)
    for event in events_of(messages, epoch, vocab_size):
        recovery.apply(event)
    return recovery
