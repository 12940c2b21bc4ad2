"""Ids of events hold what their reader has; other texts are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.errors import ApiError
from gateway.openai.responses.serializer import StreamEvent
from gateway.resume.event_ids import EventIds, Position, Replay, StreamPosition
from gateway.text.choice_text import Delta
from shared.messages.endings import FinishReason

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def delta(tokens: list[int], ends: bool) -> Delta:
    return Delta("", tokens, [], FinishReason.STOP if ends else None, None)


def id_of(event: bytes) -> str:
    first, rest = event.split(b"\n", 1)
    assert rest == b"data: x\n\n"
    return first.decode().removeprefix("id: ")


@given(TOKENS, TOKENS, st.booleans(), st.integers(0, 10**9))
def test_an_id_read_again_is_what_was_shown(
    first: list[int], second: list[int], ends: bool, cached: int
) -> None:
    ids = EventIds(3, StreamPosition())
    event = [StreamEvent(b"data: x\n\n", True, False)]
    ids.chunk(2, delta(first, False), event, cached)
    last = [StreamEvent(b"data: x\n\n", True, ends)]
    found = StreamPosition.parse(id_of(ids.chunk(2, delta(second, ends), last, cached)))
    seen = Position().after(first).after(second)
    assert found.choices[:2] == (Position(), Position())
    assert found.choices[2] == Position(seen.num_tokens, seen.checksum, True, ends)
    assert (found.cached_tokens, found.has_usage, found.is_done) == (cached, False, False)


def test_the_last_events_show_what_is_left() -> None:
    ids = EventIds(1, StreamPosition())
    usage = StreamPosition.parse(id_of(ids.usage(b"data: x\n\n", 7)))
    assert (usage.has_usage, usage.is_done) == (True, False)
    assert StreamPosition.parse(id_of(ids.done(b"data: x\n\n", 7))).is_done


@pytest.mark.parametrize(
    "text", ["x", "~", "12b~0", "1b00000000", "1b00000000~0x", "-1b00000000~0"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID"):
        StreamPosition.parse(text)


@given(TOKENS, TOKENS, st.integers(1, 3))
def test_tokens_that_come_again_are_recognised_in_any_pieces(
    seen: list[int], more: list[int], size: int
) -> None:
    replay = Replay(Position().after(seen))
    new: list[int] = []
    tokens = seen + more
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        count = replay.take(piece)
        assert count is not None
        new += piece[count:]
    assert new == more
    assert replay.is_over


def test_other_tokens_than_the_clients_are_detected() -> None:
    replay = Replay(Position().after([1, 2, 3]))
    assert replay.take([1, 2]) == 2
    assert replay.take([4, 5]) is None
