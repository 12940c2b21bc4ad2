"""Waiting in the CPU kernels: for a number in memory that another thread or process writes."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import platform
import time

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd

_X86 = platform.machine() in ("x86_64", "AMD64")


@intrinsic
def load_acquire(typingctx, address):
    """An int64, with acquire order."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, number):
    """Store an int64, after all stores before it."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """The instruction of spin loops, where there is one."""

    def codegen(context, builder, signature, args):
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), ())
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])

    return types.void(), codegen


@intrinsic
def call(typingctx, function):
    """Call ``int function()``."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(simd.I32, ())
        found = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return builder.sext(found, simd.I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_clock(typingctx, function, times):
    """Nanoseconds of a monotonic clock, by ``int clock_gettime(int, int64 times[2])``."""

    def codegen(context, builder, signature, args):
        function, times = args
        kind = ir.FunctionType(simd.I32, (simd.I32, simd.I64))
        monotonic = ir.Constant(simd.I32, time.CLOCK_MONOTONIC)
        builder.call(builder.inttoptr(function, kind.as_pointer()), [monotonic, times])
        seconds = simd.load(builder, times, simd.I64, 8)
        rest = simd.load(builder, builder.add(times, simd.i64(8)), simd.I64, 8)
        return builder.add(builder.mul(seconds, simd.i64(1_000_000_000)), rest)

    return types.int64(types.int64, types.int64), codegen
