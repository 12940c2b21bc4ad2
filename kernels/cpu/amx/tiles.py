"""AMX tiles in numba: eight registers of 16 rows x 64 bytes, and products of them.

A thread configures the tiles before it uses them, and releases them before it leaves the kernel.
Tiles have numbers known at compile time: 0 to 3 hold sums [rows, 16] float32; those behind them
rows [rows, 32] in bfloat16, as they lie in memory; the last ones weights [16, 16, 2], sixteen pairs
of inputs for sixteen outputs, which is how packed weights lie.

``multiply`` adds products of 32 inputs to a sum in the order of TDPBF16PS: the first of all pairs
one after the other, and so the second ones, both from zero; then both are added, and that is added
to the sum. So a row has the same bits whatever the number of rows of its tile is.

The type of an AMX tag chooses between the instructions and their emulation (see emulated_ir).
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.amx import emulated_ir
from kernels.cpu.runtime.bf16_dot import is_emulated_amx_tag
from kernels.cpu.runtime.memory import store_i64

ROWS = 16  # of a tile at most
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
INPUTS = 32  # of a row in a tile
STATE_BYTES = emulated_ir.STATE_BYTES
"""Memory of each thread: the configuration, and emulated tiles."""

_BYTE = ir.IntType(8)
_ALL_ROW_BYTES = 0x0040004000400040  # 64 in four words of 16 bits


@njit
def configure(amx_tag, state, rows, num_row_tiles):
    """Give the sums and ``num_row_tiles`` tiles from 4 on so many rows, the others sixteen.

    Args:
        state: address of STATE_BYTES, a thread's own.
        num_row_tiles: 1 or 2.
    """
    store_i64(state, 1)  # the palette
    store_i64(state + 8, 0)
    store_i64(state + 16, _ALL_ROW_BYTES)
    store_i64(state + 24, _ALL_ROW_BYTES)
    store_i64(state + 32, 0)
    store_i64(state + 40, 0)
    each = rows * 0x01010101  # tiles 0 to 3
    weights = 0x10101000 if num_row_tiles == 1 else 0x10100000
    row_tiles = rows if num_row_tiles == 1 else rows * 0x0101
    store_i64(state + 48, each | (weights | row_tiles) << 32)
    store_i64(state + 56, 0)
    _load_configuration(amx_tag, state)


@intrinsic
def _load_configuration(typingctx, amx_tag, state):
    def codegen(context, builder, signature, args):
        if not is_emulated_amx_tag(signature.args[0]):
            _call(builder, "ldtilecfg", [builder.inttoptr(args[1], _BYTE.as_pointer())])

    return types.void(amx_tag, types.int64), codegen


@intrinsic
def release(typingctx, amx_tag, state):
    """Give the tiles up: switches between threads save and restore those that are in use."""

    def codegen(context, builder, signature, args):
        _emit(builder, signature, "tilerelease", emulated_ir.release, args[1])

    return types.void(amx_tag, types.int64), codegen


@intrinsic(prefer_literal=True)
def clear(typingctx, amx_tag, state, tile):
    """Set a tile to zero."""

    def codegen(context, builder, signature, args):
        _emit(builder, signature, "tilezero", emulated_ir.clear, args[1], [tile])

    return types.void(amx_tag, types.int64, tile), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, amx_tag, state, tile, address, stride):
    """Load the rows of a tile, ``stride`` bytes apart."""

    def codegen(context, builder, signature, args):
        _emit(builder, signature, "tileloadd64", emulated_ir.load, args[1], [tile], args[3:])

    return types.void(amx_tag, types.int64, tile, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store(typingctx, amx_tag, state, tile, address, stride):
    """Store the rows of a tile, ``stride`` bytes apart."""

    def codegen(context, builder, signature, args):
        _emit(builder, signature, "tilestored64", emulated_ir.store, args[1], [tile], args[3:])

    return types.void(amx_tag, types.int64, tile, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def multiply(typingctx, amx_tag, state, sums, rows, weights):
    """sums += rows @ weights, of three tiles."""

    def codegen(context, builder, signature, args):
        numbers = [sums, rows, weights]
        _emit(builder, signature, "tdpbf16ps", emulated_ir.multiply, args[1], numbers)

    return types.void(amx_tag, types.int64, sums, rows, weights), codegen


def _emit(builder, signature, name, emulate, state, numbers=(), memory=()):
    """Emit an instruction on tiles, by their literal numbers, and on memory; or its emulation."""
    numbers = [tile.literal_value for tile in numbers]
    if is_emulated_amx_tag(signature.args[0]):
        emulate(builder, state, *numbers, *memory)
        return
    arguments = [ir.Constant(_BYTE, number) for number in numbers]
    if memory:
        address, stride = memory
        arguments += [builder.inttoptr(address, _BYTE.as_pointer()), stride]
    _call(builder, name, arguments)


def _call(builder, name, arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), arguments)
