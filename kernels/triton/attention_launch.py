"""The launches of one call of attention: tiles, grids, scratch and the kernels' constants."""

from functools import cached_property

import torch
import triton

from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.triton.attention_kernel import paged_attention_kernel
from kernels.triton.merge_kernel import merge_kernel
from kernels.triton.tiles import TileConfig, choose_tile, interpreting

# Rows and pieces that one program merges at a time, for short sequences (True) and for long ones.
MERGE_TILES = {True: (4, 16), False: (16, 4)}
_NO_WINDOW = 0
# Of a cut that does not depend on the batch: keys of a piece, and pieces of a context, which bound
# the scratch; from their product on, pieces grow with the context.
_FIXED_PIECE_KEYS = 512
_MOST_FIXED_PIECES = 32
_LONGEST_AXIS = 65_535  # of a grid, but for its first
_LARGEST_WINDOW = 1 << 30  # positions minus a window stay within int32


def seqs_size(num_seqs: int) -> int:
    """The size that a kernel for so many sequences is compiled for: 16, 64, 256, 1,024 and so on.

    Few sizes: each is compiled when it is first met, which takes seconds while requests wait.
    """
    size = 16
    while size < num_seqs:
        size *= 4
    return size


class AttendLaunch:
    """The launches of one call."""

    def __init__(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
        paged: bool,
        num_processors: int,
        fixed_cut: bool,
    ) -> None:
        self._query = query
        self._cache = cache
        self._batch = batch
        self._params = params
        self._out = out
        self._paged = paged
        self._num_processors = num_processors
        self._fixed_cut = fixed_cut
        self._num_tokens, num_heads, self._head_dim = query.shape
        self._num_kv_heads = cache.key.shape[1]
        self._group = num_heads // self._num_kv_heads

    @cached_property
    def short_tokens(self) -> int:
        """Rows that a sequence may have to be served by the launch for short ones."""
        return self._tile(short=True).rows // self._group

    def run(self, short: bool) -> None:
        """Attend for the short sequences of the batch, or for the long ones."""
        tile = self._tile(short)
        num_tiles = self._bound_tiles(tile, short)
        capacity = tile.capacity(self._num_processors, self._num_kv_heads)
        split = self._may_split(tile, short, num_tiles, capacity)
        num_items, num_partials = self._bound_pieces(tile, split, num_tiles, capacity)
        rows = (num_partials, self._num_kv_heads, tile.rows)
        # From the caching allocator, so in a captured graph at the same address in every replay.
        partials = self._query.new_empty((*rows, self._head_dim), dtype=torch.float32)
        logs = self._query.new_empty(rows, dtype=torch.float32)
        self._attend(tile, short, split, num_items, capacity, partials, logs)
        if split:
            # A tile in pieces has at least two of the at most twice ``capacity``.
            num_split = num_tiles if self._fixed_cut else min(num_tiles, capacity)
            self._merge(tile, short, num_split, capacity, partials, logs)

    def _tile(self, short: bool) -> TileConfig:
        dtype = self._query.dtype
        widened = self._cache.dtype.itemsize < dtype.itemsize
        return choose_tile(self._head_dim, self._group, dtype, short, widened)

    def _bound_tiles(self, tile: TileConfig, short: bool) -> int:
        """The most tiles of query tokens that the batch's sequences can have."""
        num_seqs = self._batch.context_lens.shape[0]
        if short:
            return min(num_seqs, self._num_tokens)
        tile_tokens = tile.rows // self._group
        # Every sequence has at most one tile that is not full.
        most_seqs = min(num_seqs, self._num_tokens // (self.short_tokens + 1))
        return self._num_tokens // tile_tokens + most_seqs

    def _bound_pieces(
        self, tile: TileConfig, split: bool, num_tiles: int, capacity: int
    ) -> tuple[int, int]:
        """The most pieces of all tiles, and of those tiles that have several."""
        if not split:
            return num_tiles, 1
        if not self._fixed_cut:
            return num_tiles + capacity, 2 * capacity
        pieces = triton.cdiv(self._most_keys(tile), _FIXED_PIECE_KEYS)
        most = num_tiles * max(1, min(pieces, _MOST_FIXED_PIECES))
        return most, most

    def _most_keys(self, tile: TileConfig) -> int:
        """That a tile may attend to."""
        keys = self._batch.max_context_len
        if self._params.sliding_window is not None:
            keys = min(keys, self._params.sliding_window + tile.rows)
        return keys

    def _may_split(self, tile: TileConfig, short: bool, num_tiles: int, capacity: int) -> bool:
        """Whether some batch within the bounds is worth cutting.

        Long sequences are only where their tiles leave processors idle: merging is not free. A
        fixed cut leaves nothing to the batch: short ones always go through the same kernels.
        """
        if self._fixed_cut:
            return short
        keys = self._most_keys(tile)
        return keys > tile.min_piece_tiles * tile.keys and (short or num_tiles < capacity)

    def _shared(self, tile: TileConfig, short: bool) -> dict[str, object]:
        """What both kernels cut the work by."""
        return {
            "SEQS": seqs_size(self._batch.context_lens.shape[0]),
            "GROUP": self._group,
            "HEAD_DIM": self._head_dim,
            "PADDED_DIM": max(16, triton.next_power_of_2(self._head_dim)),
            "TILE_ROWS": tile.rows,
            "TILE_KEYS": tile.keys,
            "SHORT_TOKENS": self.short_tokens,
            "SHORT": short,
            "MIN_PIECE_TILES": tile.min_piece_tiles,
            "FIXED_PIECE_TILES": _FIXED_PIECE_KEYS // tile.keys if self._fixed_cut else 0,
            "MOST_FIXED_PIECES": _MOST_FIXED_PIECES,
            "HAS_WINDOW": self._params.sliding_window is not None,
        }

    @property
    def _window(self) -> int:
        window = self._params.sliding_window
        return _NO_WINDOW if window is None else min(window, _LARGEST_WINDOW)

    def _attend(
        self,
        tile: TileConfig,
        short: bool,
        split: bool,
        num_items: int,
        capacity: int,
        partials: torch.Tensor,
        logs: torch.Tensor,
    ) -> None:
        cache, batch, params = self._cache, self._batch, self._params
        scales = cache.tensors[2:] or cache.tensors  # the kernel reads no scales without HAS_SCALES
        grid: tuple[int, ...] = (num_items, self._num_kv_heads)
        if short:
            folds = triton.cdiv(num_items, _LONGEST_AXIS)
            grid = (self._num_kv_heads, triton.cdiv(num_items, folds), folds)
        paged_attention_kernel[grid](
            self._query,
            self._out,
            cache.key,
            cache.value,
            *scales,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            partials,
            logs,
            batch.context_lens.shape[0],
            capacity,
            params.scale,
            cache.key_scale,
            cache.value_scale,
            params.softcap or 1.0,
            self._window,
            *self._query.stride()[:2],
            *self._out.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *scales[0].stride()[:3],
            *scales[1].stride()[:3],
            batch.block_tables.stride(0),
            BLOCK_SIZE=cache.key.shape[2] if self._paged else 1,
            PAGED=self._paged,
            SPLIT=split,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_SCALES=cache.key_scales is not None,
            UPCAST=interpreting() and self._query.dtype == torch.bfloat16,
            **self._shared(tile, short),
            **tile.options(),
        )

    def _merge(
        self,
        tile: TileConfig,
        short: bool,
        num_split: int,
        capacity: int,
        partials: torch.Tensor,
        logs: torch.Tensor,
    ) -> None:
        batch = self._batch
        merge_rows, merge_pieces = MERGE_TILES[short]
        used_rows = min(tile.rows, batch.max_query_len * self._group)
        grid = (self._num_kv_heads, num_split, triton.cdiv(used_rows, merge_rows))
        merge_kernel[grid](
            self._out,
            partials,
            logs,
            batch.context_lens,
            batch.query_starts,
            batch.context_lens.shape[0],
            capacity,
            self._window,
            *self._out.stride()[:2],
            MERGE_ROWS=merge_rows,
            MERGE_PIECES=merge_pieces,
            **self._shared(tile, short),
            num_warps=4,
        )
