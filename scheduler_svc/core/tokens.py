"""Generated tokens of all admitted sequences, appended with one vectorised write per step."""

import sys
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from shared.codec import IntArray


class TokenStore:
    """A row per slot. One more row swallows results of sequences that are gone.

    Rows are as long as the context, but memory is touched only as far as tokens come. Most steps
    speak of the same sequences as the step before: where their rows end is looked up and written
    down only when others are spoken of or somebody looks.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._sink = num_slots
        self._width = max_tokens + 1
        self._tokens = np.zeros((num_slots + 1) * self._width, np.int32)  # row after row
        self._begins = np.arange(num_slots + 1) * self._width
        self._ends = self._begins.copy()  # where each row's next token goes
        self._most = 0  # no row has more tokens, by those ends
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._handles: bytes | None = None  # of the last result
        self._slots = np.empty(0, np.int64)  # [len(handles)] of those, and
        self._places = np.empty(0, np.int64)  # [len(handles)] their ends, to which come
        self._num_new = 0  # tokens each

    @property
    def num_free_slots(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free)

    def open(self, handle: int, output: IntArray) -> int:
        """Give a sequence a row that starts with ``output``; the slot's number."""
        if self._handles and handle.to_bytes(4, sys.byteorder) in self._handles:
            self._settle()  # its results were swallowed so far
        slot = self._free.pop()
        self._slot_of[handle] = slot
        num_tokens = len(output)
        if num_tokens:
            begin = slot * self._width
            self._tokens[begin : begin + num_tokens] = output
            self._ends[slot] = begin + num_tokens
            self._most = max(self._most, num_tokens)
        return slot

    def close(self, handle: int) -> IntArray:
        """Take the row back; the tokens it held."""
        slot = self._slot_of.pop(handle)
        self._free.append(slot)
        output = self.output(slot)
        self._ends[slot] = slot * self._width
        return output

    def output(self, slot: int) -> IntArray:
        """A copy of the tokens of a slot."""
        self._settle()
        return self._tokens[slot * self._width : self._ends[slot]].copy()

    def append(self, handles: IntArray, tokens: IntArray) -> None:
        """One token for each handle. Handles without a row are ignored.

        Raises:
            IndexError: a row is full, or the arrays differ in length.
        """
        if len(handles) != len(tokens):
            raise IndexError(f"{len(handles)} handles for {len(tokens)} tokens")
        if self._most + self._num_new >= self._width:
            self._make_sure_of_room(handles)
        key = handles.tobytes()
        if key != self._handles:
            self._settle()
            self._slots = self._slots_of(handles)
            self._places = self._ends[self._slots]
            self._handles = key
        self._tokens[self._num_new :][self._places] = tokens
        self._num_new += 1

    def _slots_of(self, handles: IntArray) -> NDArray[np.int64]:
        found = map(self._slot_of.get, handles.tolist(), repeat(self._sink))
        return np.fromiter(found, np.int64, len(handles))

    def _settle(self) -> None:
        """Write down how far the rows have grown; the sink never fills."""
        if self._num_new:
            self._ends[self._slots] = self._places + self._num_new
            self._ends[self._sink] = self._sink * self._width
            self._most += self._num_new
            self._num_new = 0
        self._handles = None

    def _make_sure_of_room(self, handles: IntArray) -> None:
        """Some row may be full; tell whether it is one of these sequences'."""
        self._settle()
        counts = self._ends - self._begins
        self._most = int(counts.max())
        if counts[self._slots_of(handles)].max(initial=0) >= self._width:
            raise IndexError(f"a sequence has {self._width} tokens, and there is no room for more")
