"""Names of block contents: a chain of hashes over full blocks.

A block's hash covers everything from the beginning of the sequence to the block's end, so equal
hashes mean equal keys and values (PagedAttention, section 4.4, shared prefix).
"""

from hashlib import blake2b
from typing import Final

from scheduler_svc.core.blocks import BlockHash
from shared.codec import IntArray

_DIGEST_BYTES: Final = (
    16  # two different prefixes collide with probability 2**-64 after 2**32 blocks
)


def first_hash(salt: str) -> BlockHash:
    """What the chain starts from; tenants with different salts never share."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def extend(
    hashes: list[BlockHash], root: BlockHash, tokens: IntArray, first: int, block_size: int
) -> None:
    """Append the hashes of the full blocks of ``tokens`` to those of the blocks before.

    Args:
        tokens: the tokens from position ``first * block_size`` on.
        first: number of blocks that ``hashes`` covers.
    """
    previous = hashes[-1] if hashes else root
    assert len(hashes) == first, f"{len(hashes)} hashes, expected {first}"
    data = tokens.tobytes()
    width = block_size * tokens.itemsize
    for start in range(0, len(tokens) // block_size * width, width):
        content = previous + data[start : start + width]
        previous = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        hashes.append(previous)
