"""Blocks of the device pool: reference counts, and a cache of those that nobody refers to.

PagedAttention, sections 4.2 to 4.4. A block is in one of three places: referred to by at least one
block table, cached (full, findable by the hash of everything up to its end, but referred to by
nobody), or free. Cached blocks count as free: they are given away, least recently used first, when
nothing else is left. Content may be pinned: a pin refers to the block that has it, like a table.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

BlockHash = bytes


class BlockPool:
    """``allocate``, ``fork`` and ``free`` are the only ways in which blocks change hands.

    Args:
        num_blocks: blocks of the pool.
        keeps_cached: whether blocks stay findable when nobody refers to them any more.
    """

    def __init__(self, num_blocks: int, keeps_cached: bool = True) -> None:
        self.num_blocks = num_blocks
        self._keeps_cached = keeps_cached
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        # Oldest first. A plain dict finds its first key slowly once many before it are gone.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_pins: Counter[BlockHash] = Counter()
        self._pinned: set[int] = set()  # blocks with such content, to which that gives a reference
        self._num_pin_changes = 0
        self._num_changes = 0

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some table or pin refers to, each counted once."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Blocks whose content is pinned."""
        return len(self._pinned)

    @property
    def num_pinned_unused(self) -> int:
        """Of those, the ones that no table refers to; looks at each."""
        return sum(self._references[block] == 1 for block in self._pinned)

    @property
    def num_changes(self) -> int:
        """Grows whenever something happens after which more may fit than before.

        While it does not, whoever has not fitted still does not: blocks are only handed out.
        """
        return self._num_changes

    @property
    def has_pins(self) -> bool:
        """Whether any content is pinned."""
        return bool(self._num_pins)

    @property
    def num_pin_changes(self) -> int:
        """Grows whenever content is pinned or unpinned."""
        return self._num_pin_changes

    def is_pinned(self, block_hash: BlockHash) -> bool:
        """Whether this content is pinned, and so is kept once it is there."""
        return block_hash in self._num_pins

    @property
    def has_no_cache(self) -> bool:
        """Whether no block outlives the tables that refer to it."""
        return not (self._keeps_cached or self._num_pins)

    def references(self, block: int) -> int:
        """Tables that refer to a block, and one more if its content is pinned."""
        return self._references[block]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None, and nothing changed, if there are not as many."""
        free = self._free
        num_missing = count - len(free)
        if num_missing > 0:
            if num_missing > len(self._cached):
                return None
            self._evict(num_missing)
        first = len(free) - count
        blocks = free[first:]
        del free[first:]
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def fork(self, blocks: Sequence[int]) -> None:
        """One more table refers to these blocks."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is forked but nobody's"
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One table less refers to these blocks."""
        references, hash_of, cached = self._references, self._hash_of, self._cached
        self._num_changes += 1
        # The end of a table goes first: its beginning is likelier to be asked for again.
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if left:
                assert left > 0, f"block {block} is freed twice"
            elif hash_of[block] is None:
                self._free.append(block)
            else:
                cached[block] = None
                if not self._keeps_cached:
                    self._evict(1)

    # ------------------------------------------------------------------ the cache

    def register(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Make full blocks findable; the first of several with the same content is kept."""
        references, block_of, hash_of = self._references, self._block_of, self._hash_of
        pins = self._num_pins
        self._num_changes += 1
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert references[block], f"block {block} is registered but nobody's"
            if hash_of[block] is not None or block_hash in block_of:
                continue
            block_of[block_hash] = block
            hash_of[block] = block_hash
            if pins and block_hash in pins:
                self._pinned.add(block)
                references[block] += 1

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The longest run of known blocks that starts with the first hash; takes no reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Sequence[int]) -> None:
        """One more table refers to these found blocks, cached or in use."""
        self._num_changes += 1
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def num_cached_in(self, blocks: Iterable[int]) -> int:
        """How many of these found blocks ``take`` would take from ``num_free``."""
        return sum(block in self._cached for block in blocks)

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks with this content stay, those that exist and those that come to be registered."""
        self._num_pin_changes += 1
        for block_hash in hashes:
            self._num_pins[block_hash] += 1
            block = self._block_of.get(block_hash)
            if block is not None and block not in self._pinned:
                self._pinned.add(block)
                self.take([block])

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Undo one ``pin`` of the same content."""
        self._num_pin_changes += 1
        released: list[int] = []
        for block_hash in hashes:
            self._num_pins[block_hash] -= 1
            if not self._num_pins[block_hash]:
                del self._num_pins[block_hash]
                if (block := self._block_of.get(block_hash)) is not None:
                    self._pinned.remove(block)
                    released.append(block)
        self.free(released)

    def num_pinned_with(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks that would be pinned at most if this content were pinned too."""
        return len(self._num_pins) + sum(found not in self._num_pins for found in hashes)

    def _evict(self, count: int) -> None:
        """Give up the content of the least recently used of the cached blocks."""
        cached, hash_of, block_of, free = self._cached, self._hash_of, self._block_of, self._free
        for _ in range(count):
            block, _ = cached.popitem(last=False)
            block_hash = hash_of[block]
            assert block_hash is not None, f"block {block} is cached without a hash"
            del block_of[block_hash]
            hash_of[block] = None
            free.append(block)
