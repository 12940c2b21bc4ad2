"""Counts blocks of the prefix cache that are found, and those that are evicted."""

import numpy as np
from numpy.typing import NDArray

from shared.codec import IntArray
from shared.engine_view.sequences import SequenceView


class BlockReuse:
    """What plans do to the content of the prefix cache.

    A block that comes into a table as a new one has no other reference. So if it was full when its
    last table was released, its content was cached until now, and is evicted. Plans do not show
    blocks that are not findable because another one has the same content: such a block counts as
    evicted, too, unless a snapshot came between.

    Args:
        num_blocks: of the pool.
        block_size: tokens.
        keeps_cached: whether blocks stay findable when no table refers to them any more.

    Attributes:
        num_hits: blocks that admitted sequences found, in use or cached.
        num_evicted: cached blocks that were taken for other content.
        is_evicted: [num_blocks] these blocks, since this was cleared.
    """

    def __init__(self, num_blocks: int, block_size: int, keeps_cached: bool) -> None:
        self.num_hits = 0
        self.num_evicted = 0
        self.is_evicted = np.zeros(num_blocks, bool)
        self._block_size = block_size
        self._keeps_cached = keeps_cached
        # Full when they were released; of use for free blocks alone. Both are the same memory:
        # few blocks are looked up faster one by one.
        self._flags = bytearray(num_blocks)
        self._is_full = np.frombuffer(self._flags, bool)

    def correct(self, cached: IntArray, had_table: NDArray[np.bool_]) -> None:
        """Take over the blocks that a snapshot has as cached; those in tables may be free now."""
        self._is_full &= had_table
        self._is_full[cached] = True

    def release(self, sequence: SequenceView, step: int, is_preempted: bool) -> None:
        """A sequence loses its blocks; ``step`` is the last one whose result was applied."""
        if not self._keeps_cached:
            return
        request, num_tokens = sequence.request, sequence.num_kv_tokens(step)
        if request.search and not is_preempted:  # most of what beams generate is not findable
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        flags = self._flags
        for block in sequence.first_blocks(num_tokens // self._block_size):
            flags[block] = 1

    def admit(self, table: IntArray, num_computed: int, is_swapped_in: bool) -> None:
        """A sequence gets its blocks, the first of them with tokens that are computed."""
        num_found = 0 if is_swapped_in else num_computed // self._block_size
        self.num_hits += num_found
        blocks = table[num_found:]
        is_evicted = self._is_full[blocks]
        num_evicted = int(np.count_nonzero(is_evicted))
        if num_evicted:
            evicted = blocks if num_evicted == len(blocks) else blocks[is_evicted]
            self.num_evicted += num_evicted
            self.is_evicted[evicted] = True
            self._is_full[evicted] = False

    def take(self, blocks: list[int]) -> None:
        """Blocks come into tables for new content."""
        flags = self._flags
        for block in blocks:
            if flags[block]:
                flags[block] = 0
                self.is_evicted[block] = True
                self.num_evicted += 1
