"""Generated tokens of all admitted sequences, appended with one vectorised write per step."""

import sys
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from shared.codec import IntArray

_FEW = 16  # handles; more of them are looked up faster together than one by one


class TokenStore:
    """One row of tokens per slot; one more row takes the results of sequences without a slot.

    Rows are as long as the context, but memory is touched only as far as tokens are written. Most
    steps sample the same sequences as the step before. So the ends of their rows are kept aside and
    stored only when the sequences change or a row is read, and only slots of handles that are not
    at the same index as before are looked up.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._sink = num_slots
        self._width = max_tokens + 1
        self._tokens = np.zeros((num_slots + 1) * self._width, np.int32)  # row after row
        self._begins = np.arange(num_slots + 1) * self._width
        self._ends = self._begins.copy()  # where each row's next token goes
        self._most = 0  # upper bound of a row's tokens, by these ends
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._handles: IntArray = np.empty(0, np.int32)  # [n] of the last result
        self._key = b""  # the same as bytes
        self._slots = np.empty(0, np.int64)  # [n] their slots
        self._places: NDArray[np.int64] | None = None  # [n] their rows' ends when last stored
        self._num_new = 0  # tokens that each has got since

    @property
    def num_free_slots(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    def open(self, handle: int, output: IntArray) -> int:
        """Give a sequence a slot whose row starts with ``output``; return the slot."""
        slot = self._free.pop()
        self._slot_of[handle] = slot
        if handle.to_bytes(4, sys.byteorder) in self._key:
            self._settle()  # its results went to the spare row so far
            self._slots[self._handles == handle] = slot
        num_tokens = len(output)
        if num_tokens:
            begin = slot * self._width
            self._tokens[begin : begin + num_tokens] = output
            self._ends[slot] = begin + num_tokens
            self._most = max(self._most, num_tokens)
        return slot

    def close(self, handle: int) -> IntArray:
        """Free a sequence's slot; return its tokens."""
        slot = self._slot_of.pop(handle)
        self._free.append(slot)
        output = self.output(slot)
        self._ends[slot] = slot * self._width
        self._slots[self._slots == slot] = self._sink
        return output

    def output(self, slot: int) -> IntArray:
        """A copy of the tokens of a slot."""
        self._settle()
        return self._tokens[slot * self._width : self._ends[slot]].copy()

    def append(self, handles: IntArray, tokens: IntArray) -> None:
        """Append one token for each handle. Handles without a slot are ignored.

        Raises:
            IndexError: a row is full, the arrays differ in length, or a handle occurs twice.
        """
        if len(handles) != len(tokens):
            raise IndexError(f"{len(handles)} handles for {len(tokens)} tokens")
        if self._most + self._num_new >= self._width:
            self._check_capacity(handles)
        key = handles.tobytes()
        if key != self._key:
            slots = self._slots_of(handles)
            self._check_different(slots)
            self._settle()
            self._slots = slots
            self._handles = handles.copy()
            self._key = key
        if self._places is None:
            self._places = self._ends[self._slots]
        self._tokens[self._num_new :][self._places] = tokens
        self._num_new += 1

    def _slots_of(self, handles: IntArray) -> NDArray[np.int64]:
        num_handles = len(handles)
        num_both = min(num_handles, len(self._handles))
        others = (handles[:num_both] != self._handles[:num_both]).nonzero()[0].tolist()
        others += range(num_both, num_handles)
        if len(others) > _FEW:
            found = map(self._slot_of.get, handles.tolist(), repeat(self._sink))
            return np.fromiter(found, np.int64, num_handles)
        slots = np.empty(num_handles, np.int64)
        slots[:num_both] = self._slots[:num_both]
        for index in others:
            slots[index] = self._slot_of.get(int(handles[index]), self._sink)
        return slots

    def _check_different(self, slots: NDArray[np.int64]) -> None:
        """Refuse handles that occur twice: one of their two tokens would be lost."""
        counts = np.bincount(slots, minlength=self._sink + 1)
        counts[self._sink] = 0
        if counts.max() > 1:
            raise IndexError(f"{counts.max()} tokens for one sequence")

    def _settle(self) -> None:
        """Store the new ends of the rows; the spare row stays empty."""
        if self._num_new:
            assert self._places is not None, f"{self._num_new} tokens, but no ends of rows"
            self._ends[self._slots] = self._places + self._num_new
            self._ends[self._sink] = self._sink * self._width
            self._most += self._num_new
            self._num_new = 0
        self._places = None

    def _check_capacity(self, handles: IntArray) -> None:
        """Raise IndexError if the row of one of these sequences is full."""
        self._settle()
        counts = self._ends - self._begins
        self._most = int(counts.max())
        if counts[self._slots_of(handles)].max(initial=0) >= self._width:
            raise IndexError(f"a sequence has {self._width} tokens, and there is no room for more")
