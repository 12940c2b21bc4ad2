"""The CPU kernel that runs other kernels' jobs, one after the other, without leaving the threads.

Between two jobs all threads meet: what a job reads, those before it have written.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import platform

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels import cpu_jobs as fields
from kernels import cpu_simd as simd
from kernels.cpu_memory import field

# Looks at the others' arrival before a thread offers its core to somebody else: some ten
# microseconds. Most waits are shorter.
_LOOKS = 400
_X86 = platform.machine() in ("x86_64", "AMD64")


@njit
def play_tape(job):
    """Run all jobs; every thread of the team comes here."""
    entry = field(job, fields.ENTRIES)
    behind = entry + 8 * fields.ENTRY_FIELDS * field(job, fields.NUM_ENTRIES)
    team_size, give_way = field(job, fields.TEAM_SIZE), field(job, fields.GIVE_WAY)
    num_threads = 1
    if team_size != 0:
        num_threads = _call(team_size)
    while entry < behind:
        _run(field(entry, fields.KERNEL), field(entry, fields.JOB))
        if num_threads > 1:
            _meet(entry + 8 * fields.ARRIVED, num_threads, give_way)
        entry += 8 * fields.ENTRY_FIELDS


@njit
def _meet(arrived, num_threads, give_way):
    if _arrive(arrived) + 1 == num_threads:
        return
    looks = 0
    while _num_arrived(arrived) < num_threads:
        _relax()
        looks += 1
        if looks > _LOOKS and give_way != 0:
            # The thread that is waited for may need this very core.
            _call(give_way)


@intrinsic
def _run(typingctx, kernel, job):
    """Call ``void kernel(int64 job)``."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), (simd.I64,))
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _call(typingctx, function):
    """Call ``int function()``."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(simd.I32, ())
        found = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return builder.sext(found, simd.I64)

    return types.int64(types.int64), codegen


@intrinsic
def _arrive(typingctx, address):
    """Count one more, and see what those who came before have written."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.atomic_rmw("add", pointer, simd.i64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _num_arrived(typingctx, address):
    """The count, with what those who are counted have written."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _relax(typingctx):
    """Tell the core that this thread only waits."""

    def codegen(context, builder, signature, args):
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), ())
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])

    return types.void(), codegen
