"""How packed codes, scales and minimums of quantized weights lie in memory, and are multiplied."""

from dataclasses import dataclass
from enum import Enum

from kernels.cpu.linear.linear_arguments import GROUP_OUTPUTS, PANEL

# Inputs of a step of the kernels' loops, and of a piece of memory for sixteen outputs.
STEP_INPUTS = 8


class Products(Enum):
    """How inputs are multiplied by weights, which decides about the order of codes in memory."""

    FLOAT32 = "weights are dequantized, and multiplied in float32"
    INT8 = "inputs in 8 bits are multiplied by codes, as integers"


class Rounding(Enum):
    """Which inputs are rounded to 8 bits with one scale, however they are multiplied."""

    NONE = "none are rounded"
    ROWS = "those of a row"
    GROUPS = "those that share scales of weights"


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The format of packed layers.

    A task's group of outputs is one piece of memory, read from its beginning to its end. For each
    group of inputs it has the scales, then the minimums, of all outputs of the task; then for every
    eight inputs the codes of each panel.

    Attributes:
        bits: of a code.
        group_size: inputs that share scales.
        products: with these codes.
        half_scales: scales and minimums are float16, else float32.
        has_minimums: else all are zero.
        rounding: of inputs.
    """

    bits: int
    group_size: int
    products: Products
    half_scales: bool
    has_minimums: bool
    rounding: Rounding

    @property
    def step_bytes(self) -> int:
        """Of eight inputs of a panel."""
        return STEP_INPUTS * PANEL * self.bits // 8

    @property
    def header_bytes(self) -> int:
        """Of scales and minimums of a group of inputs."""
        each = GROUP_OUTPUTS * (2 if self.half_scales else 4)
        return 2 * each if self.has_minimums else each

    @property
    def group_bytes(self) -> int:
        """Of a group of inputs, for a group of outputs."""
        return self.header_bytes + self.group_size * GROUP_OUTPUTS * self.bits // 8
