"""The contract of attention backends and block movers. ``kernels/README.md`` explains symbols."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
INT8_LEVELS = 127
"""Multiples of a row's scale on either side of zero."""


def may_hold(stored: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a cache of one type may hold keys and values that are computed in another.

    Of the same type, or of a narrower one: a wider or an equally wide one would gain nothing.
    """
    return stored == computed or stored.itemsize < computed.itemsize


@dataclass(frozen=True, slots=True)
class RowArgmax:
    """Argmax of R rows; valid until the next step runs.

    Attributes:
        tokens: [R] int64, the first of the largest outputs; negative: undecided.
        values: [R] float32, that output.
    """

    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    @property
    def decided(self) -> bool:
        """Whether all rows are; else the layer has to be computed."""
        return bool(self.tokens.min() >= 0)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer in the KV pool.

    Views with arbitrary strides (the last dimension is contiguous), so that the pool may have any
    layout. A pool of ``FP8`` holds keys and values divided by the two scales of the pool. A pool of
    ``INT8`` has a scale for each token and KV head, which its elements are multiplied by.
    """

    key: torch.Tensor  # [num_blocks, Hkv, block_size, D]
    value: torch.Tensor  # [num_blocks, Hkv, block_size, D]
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scales: torch.Tensor | None = None  # [num_blocks, Hkv, block_size, 1] float32, of INT8
    value_scales: torch.Tensor | None = None  # [num_blocks, Hkv, block_size, 1] float32, of INT8

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor, *scales: torch.Tensor) -> "LayerCache":
        """A cache of ``tensors``: keys, values, and their scales if there are any."""
        key_scales, value_scales = scales or (None, None)
        return cls(key, value, key_scales=key_scales, value_scales=value_scales)

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values in the pool."""
        return self.key.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that belongs to a block: keys, values, and their scales if there are any."""
        if self.key_scales is None or self.value_scales is None:
            return self.key, self.value
        return self.key, self.value, self.key_scales, self.value_scales


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where the tokens of one step lie: the same for all layers."""

    slot_mapping: torch.Tensor  # [T] int64, block id * block_size + offset in the block
    block_tables: torch.Tensor  # [S, max_blocks] int32; entries past a sequence's end are garbage
    context_lens: torch.Tensor  # [S] int32, tokens with K/V, this step's included
    query_starts: torch.Tensor  # [S + 1] int32, rows of sequence s are [starts[s], starts[s + 1])
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention."""

    scale: float
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)


class AttentionBackend(Protocol):
    """Write new keys and values, and attend over pages; both run in place.

    Attributes:
        name: by which ``select_backend`` finds it.
        capturable: it reads nothing back from the device, so that a CUDA graph can be captured.
    """

    name: str
    capturable: bool

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types of caches, narrower than the queries' own, that it has kernels for."""

    def write_kv(
        self,
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        cache: LayerCache,
        slot_mapping: torch.Tensor,  # [T] int64
    ) -> None:
        """Store each token's key and value in its slot."""

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
    ) -> None:
        """Causal attention of each row over its own sequence's pages.

        The last row of a sequence stands at position ``context_len - 1``. A sequence without
        rows, or without context, touches nothing.
        """


@runtime_checkable
class RotatingBackend(Protocol):
    """A backend that can rotate queries and keys and write keys and values at once."""

    def rotate_and_write_kv(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        cos: torch.Tensor,  # [T, D]
        sin: torch.Tensor,  # [T, D]
        cache: LayerCache,
        slot_mapping: torch.Tensor,  # [T] int64
    ) -> torch.Tensor:
        """Rotated queries [T, H, D]; rotated keys and the values are stored in their slots."""


class BlockMover(Protocol):
    """Moves whole blocks, keys and values of all layers at once.

    Packed blocks, ``[n, bytes_per_block]`` of bytes, are described in ``kernels/block_packing.py``.
    Block ids and rows lie on the pool's device.
    """

    bytes_per_block: int

    def copy(
        self,
        sources: torch.Tensor,  # [P] int64, may repeat
        targets: torch.Tensor,  # [P] int64, all different, none of them a source
    ) -> None:
        """Copy blocks inside the pool (copy-on-write: PagedAttention, section 4.4)."""

    def pack(
        self,
        sources: torch.Tensor,  # [P] int64, blocks of the pool, may repeat
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, all different
    ) -> None:
        """Copy blocks of the pool into rows of ``packed``."""

    def unpack(
        self,
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, may repeat
        targets: torch.Tensor,  # [P] int64, blocks of the pool, all different
    ) -> None:
        """Copy rows of ``packed`` into blocks of the pool."""
