"""Tiles of the attention kernels, and the number of pieces that a launch may split keys into."""

from dataclasses import dataclass

import torch
import triton

# The least keys worth a program of their own. Of few query rows: in smaller pieces a short context
# keeps more processors busy, and up to 2,048 keys the merge still loads all pieces at once.
_MIN_PIECE_KEYS = 256
_MIN_SHORT_PIECE_KEYS = 128


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of a tile and how many threads and pipeline stages work on it."""

    rows: int  # query tokens x heads of a group, packed
    keys: int
    num_warps: int
    num_stages: int
    programs_per_processor: int  # that registers and shared memory have room for
    min_piece_keys: int = _MIN_PIECE_KEYS

    @property
    def min_piece_tiles(self) -> int:
        """The fewest tiles of keys that are worth a program of their own."""
        return max(1, self.min_piece_keys // self.keys)

    def options(self) -> dict[str, object]:
        """Options of the compiler beside the kernel's constants.

        Fusion of multiplications with additions is explicit, since Triton's default changes.
        """
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }

    def capacity(self, num_processors: int, num_kv_heads: int) -> int:
        """Pieces per KV head that run at once, less a fifth.

        Without the fifth, a batch that almost fills the device would be cut in two for nothing.
        """
        return max(1, 4 * num_processors * self.programs_per_processor // (5 * num_kv_heads))


def choose_tile(
    head_dim: int, group: int, dtype: torch.dtype, short: bool, widened: bool = False
) -> TileConfig:
    """Tile for a head size; chosen by registers and spills of compiled code, not yet by timing.

    Args:
        widened: keys and values are of a narrower type than queries, of type ``dtype``.
    """
    padded_dim = triton.next_power_of_2(head_dim)
    packed = max(16, triton.next_power_of_2(group))
    wide = dtype == torch.float32
    if short:
        keys = 64 if padded_dim <= 64 else 32
        at_once = 4 if padded_dim <= 128 else 3
        least = _MIN_SHORT_PIECE_KEYS
        if wide and widened:  # four warps would spill registers
            return TileConfig(packed, keys // 2, 8, 2, 1, least)
        return TileConfig(packed, keys // 2 if wide else keys, 4, 2 if wide else 3, at_once, least)
    if wide:  # multiplied without tensor cores, to keep float32's precision
        return TileConfig(max(packed, 32), 32 if padded_dim <= 64 else 16, 8, 2, 1)
    if padded_dim <= 128:
        return TileConfig(max(packed, 128), 64, 8, 3, 2 if padded_dim <= 64 else 1)
    return TileConfig(max(packed, 64), 32, 8, 2, 1)
