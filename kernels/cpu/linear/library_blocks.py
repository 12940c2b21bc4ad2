"""Blocks of rows multiplied by a library's kernel, on packed weights where they lie.

The library is oneDNN, inside torch: ``at::native::cpublas::brgemm`` multiplies rows by pairs of
inputs, which is how a panel lies. Its code for a number of rows is compiled at the first call, so
it is called for LIBRARY_ROWS at a time, and the rows that are left are multiplied as always.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.cpu.runtime.memory import field

LIBRARY_ROWS = 32
_INPUT_BYTES, _SUM_BYTES = 2, 4
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
# oneDNN compiles for fewer instructions than the CPU has where one of these is set.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True)
class Library:
    """Addresses of functions.

    Attributes:
        multiply: (rows, outputs, inputs, stride of rows, of pairs, of sums, whether to add, rows,
            pairs, sums, whether weights are pairs); strides in elements.
        release: gives up what a thread holds to multiply, AMX tiles for example.
    """

    multiply: int
    release: int


def find_library(
    instructions: Instructions, environment: Mapping[str, str] = os.environ
) -> Library | None:
    """The library, if it surely has a kernel for this CPU: without one it ends the process."""
    if instructions.dot not in (Dot.NATIVE, Dot.AMX) or any(map(environment.get, _LIMITS)):
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    for path in sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))
            functions = getattr(library, _BRGEMM), getattr(library, _RELEASE)
        except (AttributeError, OSError):
            continue
        found = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        if all(found):
            return Library(*found)  # type: ignore[arg-type]
    return None


@njit
def rows_by_library(args, rows):
    """How many of so many rows the library multiplies, the first ones."""
    if field(args, fields.LIBRARY) == 0 or rows < field(args, fields.LIBRARY_FEWEST_ROWS):
        return 0
    return rows // LIBRARY_ROWS * LIBRARY_ROWS


@njit
def multiply_by_library(args, rows, x, x_row, w, panel, sums):
    """sums [rows, GROUP_OUTPUTS] = x @ w for a group whose panels lie ``panel`` bytes apart."""
    multiply, in_features = field(args, fields.LIBRARY), field(args, fields.IN_FEATURES)
    for n in range(fields.GROUP):
        for r in range(0, rows, LIBRARY_ROWS):
            out = sums + r * fields.TILE_ROW + n * fields.PANEL * _SUM_BYTES
            _multiply(
                multiply, in_features, x_row // _INPUT_BYTES, x + r * x_row, w + n * panel, out
            )
    _release(field(args, fields.LIBRARY_RELEASE))


@intrinsic
def _multiply(typingctx, function, in_features, x_stride, x, w, out):
    def codegen(context, builder, signature, args):
        function, in_features, x_stride, x, w, out = args
        # A flag takes a whole place on the stack, as a number does.
        kind = ir.FunctionType(ir.VoidType(), [simd.I64] * 11)
        numbers = [simd.i64(LIBRARY_ROWS), simd.i64(fields.PANEL), in_features]
        strides = [x_stride, simd.i64(fields.PANEL), simd.i64(fields.TILE_ROW // _SUM_BYTES)]
        places = [simd.i64(0), x, w, out, simd.i64(1)]
        pointer = builder.inttoptr(function, kind.as_pointer())
        builder.call(pointer, [*numbers, *strides, *places])

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def _release(typingctx, function):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [simd.I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [simd.i64(1)])

    return types.void(types.int64), codegen
