"""The CPU kernel that runs other kernels' jobs, one after the other, without leaving the threads.

A job begins when the one before has ended: what it reads, that one has written. A job has ended
when a thread has found no task left in it and nobody is inside. Who never came is not waited for: a
thread that has lost its core to another process joins whatever job is under way when it is back.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import platform

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.memory import field

# Looks at a job that others are in before a thread offers its core to somebody else: some ten
# microseconds. Most waits are shorter.
_LOOKS = 400
_X86 = platform.machine() in ("x86_64", "AMD64")
# The tape's state is one number, so that joining a job and learning which one it is are one step:
# the job under way, and in the lower half how many threads are inside.
_INSIDE_BITS = 32
_INSIDE = (1 << _INSIDE_BITS) - 1


@njit
def play_tape(job):
    """Run all jobs; every thread of the team comes here."""
    num_entries, team_size = field(job, fields.NUM_ENTRIES), field(job, fields.TEAM_SIZE)
    if team_size == 0 or _call(team_size) == 1:
        for at in range(num_entries):
            _run_entry(job, at)
        return
    state, give_way = job + 8 * fields.STATE, field(job, fields.GIVE_WAY)
    at = _join(state)
    while at < num_entries:
        offered = _run_entry(job, at)
        _leave(state, at, give_way)
        if offered != 0 and give_way != 0:
            # Whoever takes the core now finds this thread in no job: the others go on without it.
            _call(give_way)
        at = _join(state)


@njit
def _run_entry(job, at):
    """Run a job; whether threads are to offer their cores behind it."""
    entry = field(job, fields.ENTRIES) + 8 * fields.ENTRY_FIELDS * at
    _run(field(entry, fields.KERNEL), field(entry, fields.JOB))
    return field(entry, fields.OFFERED)


@njit
def _join(state):
    """Go inside the job under way, and say which one it is."""
    return _add(state, 1) >> _INSIDE_BITS


@njit
def _leave(state, at, give_way):
    """Leave a job that has no tasks left, and wait until it has ended."""
    if _add(state, -1) & _INSIDE == 1:
        # Somebody may join in between, find nothing to do and get here, too: one of them succeeds.
        _replace(state, at << _INSIDE_BITS, (at + 1) << _INSIDE_BITS)
    looks = 0
    while _look(state) >> _INSIDE_BITS == at:
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
def _add(typingctx, address, number):
    """Add to an int64, say what it was, and see what those who changed it before have written."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _replace(typingctx, address, expected, number):
    """Write an int64 if it is what is expected."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _look(typingctx, address):
    """An int64, with what those who changed it have written."""

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
