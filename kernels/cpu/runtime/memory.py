"""Memory in the CPU kernels: loads, stores and copies at addresses, arguments, shared counters."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.kernel_arguments import NEXT_TASK, NEXT_THREAD


@intrinsic
def load_i32(typingctx, address):
    """The int32 at an address, as int64."""

    def codegen(context, builder, signature, args):
        return builder.sext(simd.load(builder, args[0], simd.I32, 4), simd.I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_i32(typingctx, address, value):
    """Store the lower half of an int64."""

    def codegen(context, builder, signature, args):
        simd.store(builder, builder.trunc(args[1], simd.I32), args[0], 4)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_i64(typingctx, address):
    """The int64 at an address."""

    def codegen(context, builder, signature, args):
        return simd.load(builder, args[0], simd.I64, 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_i64(typingctx, address, value):
    """Store an int64."""

    def codegen(context, builder, signature, args):
        simd.store(builder, args[1], args[0], 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def claim(typingctx, address):
    """Fetch and increment an int64 that threads share, so that each number goes to one thread."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.atomic_rmw("add", pointer, simd.i64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def item_bytes(typingctx, tag):
    """Size of an element."""

    def codegen(context, builder, signature, args):
        return simd.i64(simd.size_of(signature.args[0]))

    return types.int64(tag), codegen


@intrinsic
def load_element(typingctx, tag, address):
    """One element as float32."""

    def codegen(context, builder, signature, args):
        return simd.load_scalar(builder, args[1], signature.args[0])

    return types.float32(tag, types.int64), codegen


@intrinsic
def store_element(typingctx, tag, address, value):
    """One float32 rounded to the element type."""

    def codegen(context, builder, signature, args):
        simd.store_scalar(builder, args[2], args[1], signature.args[0])

    return types.void(tag, types.int64, types.float32), codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """memcpy between two addresses."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, simd.I64])
        target_pointer = builder.inttoptr(args[0], byte)
        source_pointer = builder.inttoptr(args[1], byte)
        no = ir.Constant(ir.IntType(1), 0)
        builder.call(memcpy, [target_pointer, source_pointer, args[2], no])

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fill_bytes(typingctx, target, byte, count):
    """memset of so many bytes."""

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        memset = builder.module.declare_intrinsic("llvm.memset", [pointer, simd.I64])
        value = builder.trunc(args[1], ir.IntType(8))
        no = ir.Constant(ir.IntType(1), 0)
        builder.call(memset, [builder.inttoptr(args[0], pointer), value, args[2], no])

    return types.void(types.int64, types.int64, types.int64), codegen


@njit
def field(args, index):
    """One of a kernel's arguments (see kernel_arguments)."""
    return load_i64(args + 8 * index)


@njit
def claim_task(args):
    """The number of the next task that no thread has claimed."""
    return claim(args + 8 * NEXT_TASK)


@njit
def claim_thread(args):
    """The number of this thread in the run, whose scratch memory is its own."""
    return claim(args + 8 * NEXT_THREAD)
