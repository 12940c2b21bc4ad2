"""Generated tokens of all admitted sequences, appended with one vectorised write per step."""

import sys
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from shared.codec import IntArray

_FEW = 16  # handles: more of them take less time together than one by one


class TokenStore:
    """A row per slot. One more row swallows results of sequences that are gone.

    Rows are as long as the context, but memory is touched only as far as tokens come. Most steps
    speak of the same sequences as the step before: where their rows end is looked up and written
    down only when others are spoken of or somebody looks. Of those in another step, only the ones
    are looked up that were not in the same place before.
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
        self._handles: IntArray = np.empty(0, np.int32)  # [n] of the last result,
        self._key = b""  # the same as bytes,
        self._slots = np.empty(0, np.int64)  # [n] their slots, and
        self._places: NDArray[np.int64] | None = None  # [n] their ends, once they are looked up,
        self._num_new = 0  # to which come so many tokens each

    @property
    def num_free_slots(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free)

    def open(self, handle: int, output: IntArray) -> int:
        """Give a sequence a row that starts with ``output``; the slot's number."""
        slot = self._free.pop()
        self._slot_of[handle] = slot
        if handle.to_bytes(4, sys.byteorder) in self._key:
            self._settle()  # its results were swallowed so far
            self._slots[self._handles == handle] = slot
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
        self._slots[self._slots == slot] = self._sink
        return output

    def output(self, slot: int) -> IntArray:
        """A copy of the tokens of a slot."""
        self._settle()
        return self._tokens[slot * self._width : self._ends[slot]].copy()

    def append(self, handles: IntArray, tokens: IntArray) -> None:
        """One token for each handle. Handles without a row are ignored.

        Raises:
            IndexError: a row is full, the arrays differ in length, or a handle stands there twice.
        """
        if len(handles) != len(tokens):
            raise IndexError(f"{len(handles)} handles for {len(tokens)} tokens")
        if self._most + self._num_new >= self._width:
            self._make_sure_of_room(handles)
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
        """A row that is named twice would lose one of its two tokens."""
        counts = np.bincount(slots, minlength=self._sink + 1)
        counts[self._sink] = 0
        if counts.max() > 1:
            raise IndexError(f"{counts.max()} tokens for one sequence")

    def _settle(self) -> None:
        """Write down how far the rows have grown; the sink never fills."""
        if self._num_new:
            assert self._places is not None, f"{self._num_new} tokens came to places unknown"
            self._ends[self._slots] = self._places + self._num_new
            self._ends[self._sink] = self._sink * self._width
            self._most += self._num_new
            self._num_new = 0
        self._places = None

    def _make_sure_of_room(self, handles: IntArray) -> None:
        """Some row may be full; tell whether it is one of these sequences'."""
        self._settle()
        counts = self._ends - self._begins
        self._most = int(counts.max())
        if counts[self._slots_of(handles)].max(initial=0) >= self._width:
            raise IndexError(f"a sequence has {self._width} tokens, and there is no room for more")
