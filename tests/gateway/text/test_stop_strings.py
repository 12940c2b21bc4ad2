"""Stop strings are found wherever they lie, and nothing of them is ever shown."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop_strings import StopFinder, StopStrings

LETTERS = st.sampled_from("ab")
TEXTS = st.text(LETTERS, max_size=40)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The same by searching the whole text: first end wins, then the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@settings(deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=12))
def test_however_the_text_is_cut_the_result_is_that_of_the_whole(
    text: str, stops: list[str], places: list[int]
) -> None:
    finder = StopFinder(StopStrings(stops))
    shown = ""
    for piece in cut(text, places):
        shown += finder.push(piece)
    shown += finder.finish()
    assert (shown, finder.found) == expected(text, stops)


@settings(deadline=None)
@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopFinder(StopStrings(stops))
    shown = ""
    for position, char in enumerate(text):
        shown += finder.push(char)
        if finder.found is not None:
            return
        held = text[len(shown) : position + 1]
        seen = text[: position + 1]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_nothing_follows_a_stop_string() -> None:
    finder = StopFinder(StopStrings(["END"]))
    assert finder.push("text EN") == "text "
    assert finder.push("D and more") == ""
    assert finder.found == "END"
    assert finder.push("more") == ""
    assert finder.finish() == ""


def test_the_beginning_of_a_stop_string_is_shown_if_it_goes_on_otherwise() -> None:
    finder = StopFinder(StopStrings(["END"]))
    assert finder.push("EN") == ""
    assert finder.push("ENT") == "ENENT"
    assert finder.found is None
