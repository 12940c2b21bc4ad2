"""Takes the blocks of ggml's types apart: codes, scales and minimums of weights.

A row of K inputs is a sequence of blocks of 32 or 256 weights, whose layout is that of the structs
``block_*`` in ggml (https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h). All
arithmetic on scales and minimums is exact in float32, or rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.quantized_weight import QuantizedWeight

_SMALL, _LARGE = 32, 256  # weights of a block
# ggml's kvalues_iq4nl.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [blocks, weights] int8; scales and minimums [blocks, weights / group size] float32."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks.

    Attributes:
        name: ggml's.
        block_size: weights of a block.
        block_bytes: of a block.
        bits: of the codes here: 8 for all that exceed 4.
        group_size: weights that share a scale.
        take_apart: makes the parts of blocks [blocks, block_bytes] uint8.
    """

    name: str
    block_size: int
    block_bytes: int
    bits: int
    group_size: int
    take_apart: Callable[[torch.Tensor], Parts]

    def row_bytes(self, inputs: int) -> int | None:
        """Bytes of a row; None: such a row has no whole number of blocks."""
        blocks, rest = divmod(inputs, self.block_size)
        return None if rest else blocks * self.block_bytes

    def quantized(
        self,
        rows: torch.Tensor,  # [N, row bytes] uint8
    ) -> QuantizedWeight:
        """The weight [N, K]."""
        blocks = rows.reshape(-1, self.block_bytes)
        codes, scales, minimums = self.take_apart(blocks)
        outputs = rows.shape[0]
        return QuantizedWeight(
            codes.reshape(outputs, -1),
            scales.reshape(outputs, -1),
            None if minimums is None else minimums.reshape(outputs, -1),
            self.bits,
            self.group_size,
        )


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A float16 of each block, as [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes [blocks, n], then the high ones: [blocks, 2 n] uint8."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, each as 16 or 0: [blocks, 32] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> shifts & 1) << 4).flatten(1)


def _signed(codes: torch.Tensor, offset: int) -> torch.Tensor:
    """Codes from 0 minus an offset, as int8."""
    return codes.to(torch.int8) - offset


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _signed(_nibbles(blocks[:, 2:]), 8), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    scales = _halves(blocks, 0)
    return _signed(_nibbles(blocks[:, 4:]), 8), scales, _halves(blocks, 2) + 8 * scales


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _signed(codes, 16), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.to(torch.int8), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _six_bit_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and what is subtracted, of eight groups: [blocks, 8] float32."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), 1)
    subtracted = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * subtracted


def _paired_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes [blocks, 256]: of each 32 bytes the low halves, then the high ones."""
    each = packed.reshape(-1, 4, 32)
    return torch.stack((each & 15, each >> 4), 2).flatten(1)


def _q4_k(blocks: torch.Tensor) -> Parts:
    scales, subtracted = _six_bit_scales(blocks)
    return _signed(_paired_nibbles(blocks[:, 16:]), 8), scales, 8 * scales - subtracted


def _q5_k(blocks: torch.Tensor) -> Parts:
    scales, subtracted = _six_bit_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4  # [blocks, 8, 32]
    codes = _paired_nibbles(blocks[:, 48:]) | fifth.flatten(1)
    return codes.to(torch.int8), scales, -subtracted


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).flatten(1)  # [blocks, 256]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3  # [blocks, 2, 4, 32]
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _signed(low | high.flatten(1) << 4, 32), _halves(blocks, 208) * scales, None


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Codes [blocks, 256] of two bits: of each 32 bytes the lowest bits first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1)


def _q2_k(blocks: torch.Tensor) -> Parts:
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15)
    subtracted = _halves(blocks, 82) * (blocks[:, :16] >> 4)
    return _two_bits(blocks[:, 16:80]).to(torch.int8), scales, -subtracted


def _q3_k(blocks: torch.Tensor) -> Parts:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    third = blocks[:, :32].unsqueeze(1) >> shifts & 1  # [blocks, 8, 32]
    codes = _two_bits(blocks[:, 32:96]) | third.flatten(1) << 2
    high = blocks[:, 104:108].unsqueeze(1) >> shifts[::2] & 3  # [blocks, 4, 4]
    scales = _signed(_nibbles(blocks[:, 96:104]) | high.flatten(1) << 4, 32)
    return _signed(codes, 4), _halves(blocks, 108) * scales, None


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _levels(_nibbles(blocks[:, 2:])), _halves(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    places = torch.arange(0, 16, 2, device=blocks.device)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int() >> places & 3  # [blocks, 8]
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return _levels(codes), _halves(blocks, 0) * ((low | high << 4) - 32), None


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of 8 bits that codes of the IQ4 types stand for."""
    return torch.tensor(_IQ4_LEVELS, dtype=torch.int8, device=codes.device)[codes.int()]


BLOCK_TYPES = {
    2: BlockType("Q4_0", _SMALL, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", _SMALL, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", _SMALL, 22, 8, 32, _q5_0),
    7: BlockType("Q5_1", _SMALL, 24, 8, 32, _q5_1),
    8: BlockType("Q8_0", _SMALL, 34, 8, 32, _q8_0),
    10: BlockType("Q2_K", _LARGE, 84, 4, 16, _q2_k),
    11: BlockType("Q3_K", _LARGE, 110, 4, 16, _q3_k),
    12: BlockType("Q4_K", _LARGE, 144, 4, 32, _q4_k),
    13: BlockType("Q5_K", _LARGE, 176, 8, 32, _q5_k),
    14: BlockType("Q6_K", _LARGE, 210, 8, 16, _q6_k),
    20: BlockType("IQ4_NL", _SMALL, 18, 8, 32, _iq4_nl),
    23: BlockType("IQ4_XS", _LARGE, 136, 8, 32, _iq4_xs),
}
"""By ggml's number."""
