"""Finds markers such as ``<tool_call>`` in text that arrives in pieces, and trims text at them."""

from collections.abc import Sequence

_SPACES = " \t\r\n"


def scan(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """The length of the text before the first marker, and the marker.

    Without a marker, the length of the text that is certainly not the beginning of one. No marker
    may be the beginning of another.
    """
    first, found = len(text), None
    for marker in markers:
        start = text.find(marker, 0, first + len(marker) - 1)
        if 0 <= start < first:
            first, found = start, marker
    if found is not None:
        return first, found
    return len(text) - max((_overlap(text, marker) for marker in markers), default=0), None


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of the text that begins a marker."""
    longest = min(len(marker) - 1, len(text))
    start = text.find(marker[0], len(text) - longest)
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0


class TrimmedText:
    """Text of one kind that is shown without the white space beside markers.

    White space is held back until other text follows, and dropped where a marker follows.

    Args:
        after_marker: the text begins behind a marker, so that its leading white space is dropped.
    """

    def __init__(self, after_marker: bool = False) -> None:
        self._after_marker = after_marker
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if self._after_marker:
            text = text.lstrip(_SPACES)
            if not text:
                return ""
            self._after_marker = False
        text = self._held + text
        shown = text.rstrip(_SPACES)
        self._held = text[len(shown) :]
        return shown

    def mark(self) -> None:
        """A marker follows."""
        self._after_marker, self._held = True, ""

    def finish(self) -> str:
        """The white space that was held back, at the end of all text."""
        held, self._held = self._held, ""
        return held
