"""Which lines of a batch have a result, and where another gateway goes on."""

import numpy as np

from gateway.batches.line_reader import Line
from gateway.batches.records import Progress


class LineProgress:
    """Counts lines as they are read and done, in any order.

    Args:
        start: as it was written last.
    """

    def __init__(self, start: Progress) -> None:
        self._first = start.line  # that has no result, or the last one that was read
        self._places = {start.line: (start.piece, start.offset)}  # of it and later ones
        self._done = set(start.done.tolist())  # it and later ones

    def read(self, line: Line) -> None:
        """A line was read; until the next one is, it is not passed."""
        self._places[line.number] = (line.piece, line.offset)
        self._advance()

    def finish(self, number: int) -> None:
        """A line has its result, or needs none."""
        self._done.add(number)
        self._advance()

    def is_done(self, number: int) -> bool:
        """Whether a line has its result."""
        return number < self._first or number in self._done

    def ahead(self, number: int) -> int:
        """Lines between the first without a result and another one."""
        return number - self._first

    def snapshot(self) -> Progress:
        """What is to be written."""
        place = self._places[self._first]
        return Progress(self._first, *place, np.array(sorted(self._done), np.int32))

    def _advance(self) -> None:
        while self._first in self._done and self._first + 1 in self._places:
            self._done.discard(self._first)
            del self._places[self._first]
            self._first += 1
