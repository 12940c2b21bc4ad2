"""Hashes of block contents, chained over full blocks.

A block's hash covers everything from the beginning of the sequence to the block's end, so equal
hashes mean equal keys and values (PagedAttention, section 4.4, shared prefix). A chain starts from
a root that belongs to one tenant and one salt, or, where tenants share, to the salt alone. Roots
and blocks are hashed in separate domains, and each text in a root is hashed with its length, so no
choice of salt or tokens gives a hash of another chain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from scheduler_svc.core.blocks.block_pool import BlockHash, BlockPool
from shared.codec import IntArray

_DIGEST_BYTES: Final = (
    16  # two different prefixes collide with probability 2**-64 after 2**32 blocks
)
_NUM_ROOTS: Final = 64  # cached: most requests have the salt of an earlier one
_ROOT: Final = b"prefix root"  # blake2b's "person" separates the domains
_BLOCK: Final = b"prefix block"


@dataclass(frozen=True, slots=True)
class Chain:
    """The hash chain of one group's blocks.

    Attributes:
        common: hashes of its leading blocks that all tenants share because they are pinned.
        root: the chain of all other blocks starts from it.
        num_pin_changes: of the pool when the chain was made.
    """

    common: tuple[BlockHash, ...]
    root: BlockHash
    num_pin_changes: int

    def is_like(self, other: "Chain") -> bool:
        """Whether both give the same hashes."""
        return self.root == other.root and self.common == other.common

    def extend(self, hashes: list[BlockHash], tokens: IntArray, block_size: int) -> None:
        """Append the hashes of full blocks of ``tokens`` that ``hashes`` does not cover yet.

        Args:
            tokens: the sequence from its first token on.
        """
        num_common, num_full = len(self.common), len(tokens) // block_size
        if len(hashes) < num_common:
            hashes += self.common[len(hashes) : min(num_common, num_full)]
        first = len(hashes)
        previous = self.root if first <= num_common else hashes[-1]
        hashes.extend(_links(previous, tokens[first * block_size :], block_size))


@lru_cache(maxsize=_NUM_ROOTS)
def shared_root(salt: str) -> BlockHash:
    """Root of content that all tenants with this salt share."""
    return _root("all", salt)


def tenant_root(tenant: str, salt: str, behind: BlockHash = b"") -> BlockHash:
    """Root of content that one tenant alone finds.

    Args:
        behind: hash of the last block of a shared beginning, if there is one.
    """
    return _root("tenant", tenant, salt, behind)


def shared_hashes(salt: str, tokens: IntArray, block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of ``tokens``, in the chain that all tenants share."""
    return list(_links(shared_root(salt), tokens, block_size))


def shared_chain(salt: str, pool: BlockPool) -> Chain:
    """Chain of a group that shares all its blocks with all tenants."""
    return Chain((), shared_root(salt), pool.num_pin_changes)


def tenant_chain(
    tenant: str, salt: str, prompt: IntArray, block_size: int, pool: BlockPool
) -> Chain:
    """Chain of a group that shares its blocks with its own tenant, and pinned ones with all."""
    common: list[BlockHash] = []
    if pool.has_pins:
        for block_hash in _links(shared_root(salt), prompt, block_size):
            if not pool.is_pinned(block_hash):
                break
            common.append(block_hash)
    behind = common[-1] if common else b""
    return Chain(tuple(common), tenant_root(tenant, salt, behind), pool.num_pin_changes)


def _links(previous: BlockHash, tokens: IntArray, block_size: int) -> Iterator[BlockHash]:
    """Hashes of the full blocks of ``tokens``; each covers the one before."""
    data = memoryview(tokens.tobytes())
    width = block_size * tokens.itemsize
    for start in range(0, len(data) - width + 1, width):
        content = previous + data[start : start + width]
        previous = blake2b(content, digest_size=_DIGEST_BYTES, person=_BLOCK).digest()
        yield previous


def _root(*fields: str | bytes) -> BlockHash:
    digest = blake2b(digest_size=_DIGEST_BYTES, person=_ROOT)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
