"""Layout of virtual memory: token by token, each with all of its layers.

The layout is ``[block, block_size, layer, 2, kv_head, head_dim]``, with scales of keys and values
behind those of their layer. A sequence whose blocks are
mapped to contiguous addresses is one array of tokens. A block is a whole number of pages for any
number of layers (vAttention, section 8.2: tensor slicing).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu_worker.model.ragged_model import LayerShape
from kernels.interface import LayerCache
from shared.errors import SettingsError

# Tokens may be padded by this factor at most, so that blocks fill whole pages.
_MOST_PADDING = 1.25
_LARGEST_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The layout of one model's tokens.

    Attributes:
        shapes: the model's attention layers.
        block_size: tokens in a block.
        token_bytes: stride from one token to the next, padding included.
    """

    shapes: tuple[LayerShape, ...]
    block_size: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: a whole number of pages."""
        return self.block_size * self.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of a token without the padding."""
        return sum(shape.bytes_per_token for shape in self.shapes)

    def views(self, memory: torch.Tensor, tokens_each: int) -> dict[nn.Module, LayerCache]:
        """Each layer's view of memory [bytes], in pieces of ``tokens_each`` tokens.

        The pieces are the blocks of a pool, or ranges of addresses. Nothing is read or written.
        """
        num_pieces = memory.numel() // (tokens_each * self.token_bytes)
        found, first = {}, 0
        for shape in self.shapes:
            parts = [(shape.dtype, shape.head_dim)] * 2
            if shape.scale_bytes:
                parts += [(torch.float32, 1)] * 2
            views = []
            for dtype, width in parts:
                item = dtype.itemsize
                size = (num_pieces, shape.num_kv_heads, tokens_each, width)
                token = self.token_bytes // item
                stride = (tokens_each * token, width, token, 1)
                views.append(memory.view(dtype).as_strided(size, stride, first // item))
                first += shape.num_kv_heads * width * item
            found[shape.module] = LayerCache.of(*views)
        return found


def fit_tokens(shapes: Sequence[LayerShape], block_size: int, page_bytes: int) -> TokenLayout:
    """The smallest layout in which blocks are whole pages.

    Raises:
        SettingsError: padding would waste too much; the error names a block size that fits, if
            there is one.
    """
    exact = sum(shape.bytes_per_token for shape in shapes)
    padded = _padded(exact, block_size, page_bytes)
    if padded > _MOST_PADDING * exact:
        raise SettingsError("--block-size", block_size, _advice(exact, block_size, page_bytes))
    return TokenLayout(tuple(shapes), block_size, padded)


def _padded(token_bytes: int, block_size: int, page_bytes: int) -> int:
    """The fewest bytes per token with which a block is a whole number of pages."""
    step = page_bytes // math.gcd(page_bytes, block_size)
    return -(-token_bytes // step) * step


def _advice(token_bytes: int, block_size: int, page_bytes: int) -> str:
    problem = (
        f"a block of virtual memory must be whole pages of {page_bytes} bytes, and {block_size} "
        f"tokens of {token_bytes} bytes are {block_size * token_bytes}"
    )
    larger = block_size
    while (larger := 2 * larger) <= _LARGEST_BLOCK_TOKENS:
        if _padded(token_bytes, larger, page_bytes) <= _MOST_PADDING * token_bytes:
            return f"{problem}; --block-size {larger} fits"
    return f"{problem}; no block size fits this model: use --kv-memory paged"
