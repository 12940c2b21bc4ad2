"""Arguments of CPU kernels: one row of int64 numbers, mostly addresses and strides in bytes.

A kernel gets the address of the row, instead of ten arrays whose unpacking by numba would cost more
than a small kernel runs. Each package of kernels lists its fields and layouts in a module of its
own; here is what all of them share.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

# Every row begins with two counters, zero before each run, that the kernel's threads share.
NEXT_TASK = 0
NEXT_THREAD = 1


class StepField(IntEnum):
    """Arguments that a step decides, the same for all layers; they index ``CapturedGraph``'s."""

    SLOTS = 0
    TABLES = 1
    TABLE_ROW = 2
    CONTEXT_LENS = 3
    QUERY_STARTS = 4
    NUM_SEQS = 5
    TOKEN_IDS = 6
    POSITIONS = 7


def _no_weights(_: Sequence[int]) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ArgumentLayout:
    """Which of a kernel's arguments change from step to step: what a captured graph patches.

    Attributes:
        num_fields: numbers in the row.
        rows: field of the number of rows, a multiple of the step's tokens; None: there is none.
        chunk_rows: field of the rows that one task handles: all rows, up to ``max_chunk_rows``.
        scratch: field of the address of the threads' scratch memory; the next field is the number
            of bytes of each thread.
        step_fields: other fields, and which of the step's arguments goes there.
        multiplications: of one row, by the arguments.
    """

    num_fields: int
    rows: int | None = None
    chunk_rows: int | None = None
    max_chunk_rows: int = 0
    scratch: int | None = None
    step_fields: tuple[tuple[int, StepField], ...] = ()
    multiplications: Callable[[Sequence[int]], int] = _no_weights


def float_bits(number: float) -> int:
    """The bits of a float32, in the lower half of an int64."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits
