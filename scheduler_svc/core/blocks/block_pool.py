"""A pool of blocks: reference counts, and the prefix cache of blocks without references.

PagedAttention, sections 4.2 to 4.4. A block is in one of three states: *used*, with a reference
from at least one block table; *cached*, without references, but full and findable by the hash of
everything up to its end; or *free*. Cached blocks count as free: they are evicted, least recently
used first, when no others are left. Content may be pinned: a pin counts as a reference.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

BlockHash = bytes


class BlockPool:
    """Reference-counted blocks; tables get and return them through ``allocate``, ``fork``, ``take``
    and ``free`` alone.

    Args:
        num_blocks: size of the pool.
        keeps_cached: whether blocks stay findable when no table refers to them any more.
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
        self._pinned: set[int] = set()  # blocks with pinned content; each has a reference for it
        self._num_pin_changes = 0
        self._num_changes = 0

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return, cached ones included."""
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
        """Pinned blocks that no table refers to; visits each."""
        return sum(self._references[block] == 1 for block in self._pinned)

    @property
    def num_changes(self) -> int:
        """Grows with every change after which an allocation that failed may succeed.

        While it stays the same, blocks are only handed out.
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
        """Whether this content is pinned, so that its block is kept once it is computed."""
        return block_hash in self._num_pins

    @property
    def has_no_cache(self) -> bool:
        """Whether no block outlives the tables that refer to it."""
        return not (self._keeps_cached or self._num_pins)

    def references(self, block: int) -> int:
        """Number of tables that refer to a block, plus one if its content is pinned."""
        return self._references[block]

    def cached_blocks(self) -> list[int]:
        """Free blocks whose content can still be found, least recently used first."""
        return list(self._cached)

    def pinned_blocks(self) -> list[int]:
        """Blocks whose content is pinned."""
        return sorted(self._pinned)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks; None, and no change, if there are not as many."""
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
            assert self._references[block] > 0, f"block {block} is forked without a reference"
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One table less refers to these blocks."""
        references, hash_of, cached = self._references, self._hash_of, self._cached
        self._num_changes += 1
        # The end of a table is evicted first: its beginning is likelier to be used again.
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

    # ------------------------------------------------------------ prefix cache

    def register(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Make full blocks findable; the first of several with the same content is kept."""
        references, block_of, hash_of = self._references, self._block_of, self._hash_of
        pins = self._num_pins
        self._num_changes += 1
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert references[block], f"block {block} is registered without a reference"
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
        """How many of these found blocks are cached, so that ``take`` lowers ``num_free``."""
        return sum(block in self._cached for block in blocks)

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Keep blocks with this content, those that exist and those that will be registered."""
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
        """Upper bound of pinned blocks if this content were pinned too."""
        return len(self._num_pins) + sum(found not in self._num_pins for found in hashes)

    def _evict(self, count: int) -> None:
        """Free the least recently used of the cached blocks."""
        cached, hash_of, block_of, free = self._cached, self._hash_of, self._block_of, self._free
        for _ in range(count):
            block, _ = cached.popitem(last=False)
            block_hash = hash_of[block]
            assert block_hash is not None, f"block {block} is cached without a hash"
            del block_of[block_hash]
            hash_of[block] = None
            free.append(block)
