"""Finds stop strings across tokens, and holds back text that may be the beginning of one."""

from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one call as automata, shared by all its choices. Immutable.

    Each string is a Knuth-Morris-Pratt automaton, so a character costs the same however long the
    strings are.

    Attributes:
        texts: longest first, since of two that end at the same character the longer begins earlier.
        borders: of each text, for every prefix the length of its longest proper suffix that is
            also a prefix.
    """

    __slots__ = ("borders", "texts")

    def __init__(self, stops: Sequence[str]) -> None:
        self.texts = tuple(sorted(set(stops), key=len, reverse=True))
        self.borders = tuple(_borders(text) for text in self.texts)


class StopFinder:
    """Finds the first of several strings in text that arrives in pieces.

    The first is the one that ends first, and the longest of those that end at the same character.
    The result depends on the text alone, not on how it is cut into pieces.

    Args:
        include: the stop string is part of the text that is shown.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.texts)  # characters of each stop that the text ends with
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now; "" once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._matched:
            return text
        for position, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                self.found = stop
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(stop)]
        seen = self._held + text
        cut = len(seen) - max(self._matched)
        self._held = seen[cut:]
        return seen[:cut]

    def finish(self) -> str:
        """The text that was held back, at the end of all text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for index, stop in enumerate(self._stops.texts):
            borders = self._stops.borders[index]
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                found = found or stop
                self._matched[index] = 0
        return found


def _borders(pattern: str) -> "array[int]":
    borders = array("I", bytes(array("I").itemsize * len(pattern)))
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        borders[position] = length
    return borders
