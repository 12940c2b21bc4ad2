"""Events of entries that are repeated, missing, damaged or of another epoch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shared.bus.api import Entry, EntryId
from shared.codec import Message, encode
from shared.messages.outputs import ChoiceState, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted
from shared.messages.requests import Stop
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step
from shared.outputs_log.reader import OutputsReader
from tests.scheduler_svc.test_recovery import result, state
from tests.support.requests import submit

STARTED = EpochStarted(5, "scheduler", ("worker",))
ENDED = RequestEnded("x", "abort", "", "7-1")


def read(reader: OutputsReader, at: EntryId, *messages: Message | bytes) -> list[OutputsEvent]:
    data = [found if isinstance(found, bytes) else encode(found) for found in messages]
    return list(reader.read(Entry(at, tuple(data))))


def follow(*messages: Message, first: EntryId | None = None) -> list[OutputsEvent]:
    """Events of one entry for each message; they begin with the start of epoch 5 by default."""
    reader, events = OutputsReader(), list[OutputsEvent]()
    at = first or EntryId(5, 0)
    for message in messages if first else (STARTED, *messages):
        events += read(reader, at, message)
        at = EntryId(at.epoch, at.seq + 1)
    return events


def kinds(events: Sequence[OutputsEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_result_becomes_a_step_with_its_rows_and_ends() -> None:
    _, step = follow(result(1, {7: 10, 8: 20}, ended=[8]))
    assert isinstance(step, Step)
    assert (step.handles, step.tokens, step.ends) == ([7, 8], [10, 20], {1: "stop"})


def test_a_repeated_result_gives_no_event() -> None:
    assert kinds(follow(result(1, {7: 1}), result(1, {7: 1}))) == ["EpochStarted", "Step"]


def test_a_missing_result_gives_a_gap_that_names_the_steps() -> None:
    _, _, gap, step = follow(result(1, {7: 1}), result(4, {7: 2}))
    assert isinstance(gap, Gap)
    assert gap.missing_steps == (2, 4)
    assert isinstance(step, Step)


def test_a_missing_entry_gives_a_gap_before_what_comes_next() -> None:
    reader = OutputsReader()
    read(reader, EntryId(5, 0), STARTED)
    assert kinds(read(reader, EntryId(5, 2), ENDED)) == ["Gap", "RequestEnded"]
    assert kinds(read(reader, EntryId(5, 3), ENDED)) == ["RequestEnded"]


def test_an_epoch_without_its_start_gives_a_gap() -> None:
    reader = OutputsReader()
    read(reader, EntryId(5, 0), STARTED)
    assert kinds(read(reader, EntryId(6, 0), ENDED)) == ["Gap", "RequestEnded"]


def test_the_next_result_follows_the_earliest_state() -> None:
    later, earlier = replace(state("b", 2, []), step=9), replace(state("a", 1, []), step=8)
    found = follow(later, earlier, result(9, {1: 5}), first=EntryId(5, 70))
    assert kinds(found) == ["Gap", "RequestState", "RequestState", "Step"]
    found = follow(later, earlier, result(10, {1: 5}), first=EntryId(5, 70))
    assert kinds(found) == ["Gap", "RequestState", "RequestState", "Gap", "Step"]


def test_the_start_of_an_epoch_in_an_entry_of_another_is_damaged() -> None:
    assert kinds(read(OutputsReader(), EntryId(6, 0), STARTED)) == ["Damaged"]


@pytest.mark.parametrize(
    "bad",
    [
        b"junk",
        encode(Stop("a", 0, 1)),
        encode(RequestEnded("a", "tired", "", "7-1")),
        encode(RequestEnded("a", "abort", "", "never")),
        encode(result(1, {7: -1})),
        encode(replace(result(1, {7: 1, 8: 2}), handles=np.array([7, 7], np.int32))),
        encode(replace(result(1, {7: 1}, ended=[7]), ended_rows=np.array([1], np.int32))),
        encode(
            RequestState(
                submit("a"), (ChoiceState(1, 7, np.empty(0, np.int32), finish_reason=""),), "0-0"
            )
        ),
    ],
)
def test_what_cannot_be_is_damaged_and_what_stands_beside_it_is_read(bad: bytes) -> None:
    reader = OutputsReader()
    read(reader, EntryId(5, 0), STARTED)
    assert kinds(read(reader, EntryId(5, 1), bad, ENDED)) == ["Damaged", "RequestEnded"]


def test_a_token_that_the_vocabulary_has_not_is_damaged() -> None:
    reader = OutputsReader(vocab_size=100)
    read(reader, EntryId(5, 0), STARTED)
    assert kinds(read(reader, EntryId(5, 1), result(1, {7: 100}))) == ["Damaged"]


def test_a_reader_that_awaits_an_epoch_passes_the_rest_of_the_damaged_entry() -> None:
    reader, found = OutputsReader(), list[OutputsEvent]()
    read(reader, EntryId(5, 0), STARTED)
    for event in reader.read(Entry(EntryId(5, 1), (b"junk", encode(ENDED)))):
        found.append(event)
        if isinstance(event, Damaged):
            reader.position.await_epoch()
    assert kinds(found) == ["Damaged"]
    assert read(reader, EntryId(5, 2), ENDED) == []
    assert kinds(read(reader, EntryId(6, 0), replace(STARTED, epoch=6))) == ["EpochStarted"]


def test_a_damaged_entry_of_an_earlier_epoch_does_not_bring_back_the_awaited_one() -> None:
    reader = OutputsReader()
    read(reader, EntryId(7, 0), replace(STARTED, epoch=7))
    read(reader, EntryId(7, 1), ENDED)
    reader.server_restarted(EntryId(7, 0))  # the log is read again from its start
    for event in reader.read(Entry(EntryId(5, 3), (b"junk",))):
        assert isinstance(event, Damaged)
        reader.position.await_epoch()
    assert read(reader, EntryId(7, 1), result(1, {1: 2})) == []


def test_the_requests_cursor_is_that_of_the_last_message_of_this_epoch() -> None:
    reader = OutputsReader()
    read(reader, EntryId(5, 0), STARTED)
    assert reader.requests_cursor is None
    read(reader, EntryId(5, 1), ENDED)
    assert reader.requests_cursor == EntryId(7, 1)
    read(reader, EntryId(6, 0), replace(STARTED, epoch=6))
    assert reader.requests_cursor is None


def test_messages_that_were_decoded_give_the_same_events() -> None:
    reader = OutputsReader()
    log: list[Message] = [STARTED, state("a", 1, []), result(1, {1: 5}), ENDED]
    found = [
        event
        for seq, message in enumerate(log)
        for event in reader.read_message(EntryId(5, seq), message)
    ]
    assert kinds(found) == kinds(follow(*log[1:]))
    assert isinstance(log[2], StepResult)
