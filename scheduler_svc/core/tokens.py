"""Generated tokens of all admitted sequences, appended with one vectorised write per step."""

from itertools import repeat

import numpy as np

from shared.codec import IntArray


class TokenStore:
    """A row per slot. One more row swallows results of sequences that are gone.

    Rows are as long as the context, but memory is touched only as far as tokens come.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._sink = num_slots
        self._tokens = np.zeros((num_slots + 1, max_tokens + 1), np.int32)
        self._counts = np.zeros(num_slots + 1, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        # Most steps speak of the same sequences as the step before.
        self._last_handles: bytes | None = None
        self._last_slots = np.empty(0, np.int64)

    @property
    def num_free_slots(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free)

    def open(self, handle: int, output: IntArray) -> int:
        """Give a sequence a row that starts with ``output``; the slot's number."""
        slot = self._free.pop()
        self._slot_of[handle] = slot
        self._tokens[slot, : len(output)] = output
        self._counts[slot] = len(output)
        self._last_handles = None
        return slot

    def close(self, handle: int) -> IntArray:
        """Take the row back; the tokens it held."""
        slot = self._slot_of.pop(handle)
        self._free.append(slot)
        self._last_handles = None
        return self.output(slot)

    def output(self, slot: int) -> IntArray:
        """A copy of the tokens of a slot."""
        return self._tokens[slot, : self._counts[slot]].copy()

    def count(self, slot: int) -> int:
        """Number of tokens of a slot."""
        return int(self._counts[slot])

    def append(self, handles: IntArray, tokens: IntArray) -> None:
        """One token for each handle. Handles without a row are ignored.

        Raises:
            IndexError: a row is full, or the arrays differ in length.
        """
        if len(handles) != len(tokens):
            raise IndexError(f"{len(handles)} handles for {len(tokens)} tokens")
        key = handles.tobytes()
        if key != self._last_handles:
            found = map(self._slot_of.get, handles.tolist(), repeat(self._sink))
            self._last_slots = np.fromiter(found, np.int64, len(handles))
            self._last_handles = key
        slots = self._last_slots
        self._tokens[slots, self._counts[slots]] = tokens
        self._counts[slots] += 1
        self._counts[self._sink] = 0
