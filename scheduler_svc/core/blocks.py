"""The device pool's free blocks (PagedAttention, section 4.2: the KV cache manager)."""


class BlockPool:
    """Fixed-size blocks, all alike; which one is handed out does not matter.

    The last block freed is the first handed out again: it is the likeliest to be in a cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._in_use = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can still hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks handed out."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None, and nothing changed, if there are not as many."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self._in_use[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back."""
        for block in blocks:
            assert self._in_use[block], f"block {block} is freed twice"
            self._in_use[block] = 0
        self._free.extend(reversed(blocks))
