"""The CPU kernel that replays a captured graph: ops run one after the other on the same threads.

An op starts when the one before has ended, whose outputs it reads. An op has ended when a thread
finds no task left in it and no thread is inside. Threads that never joined the op are not waited
for: one that lost its core to another process joins the current op when it runs again.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from functools import cache

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.memory import field
from kernels.cpu.runtime.waiting import call, load_acquire, pause

# Arguments, behind the two counters.
OPS, NUM_OPS = 2, 3
TEAM_SIZE, SCHED_YIELD = 4, 5  # functions without arguments that return an int32; zero for none
STATE = 8  # on a cache line of its own, since threads wait for it
GRAPH_LAYOUT = ArgumentLayout(16)
# Of each op.
KERNEL, ARGUMENTS = 0, 1  # addresses
YIELDS = 2  # whether threads yield their cores behind it
OP_FIELDS = 4

# Times that a waiting thread reads the state before it yields its core: some ten microseconds. Most
# waits are shorter.
_SPINS = 400
# The state is one number, so that one instruction joins the current op and returns its index: the
# index in the upper half, and in the lower half the number of threads inside.
_INSIDE_BITS = 32
_INSIDE = (1 << _INSIDE_BITS) - 1


@cache
def graph_kernel() -> Kernel:
    """The kernel that replays captured graphs."""
    return compile_kernel(graph_tasks, GRAPH_LAYOUT)


@njit
def graph_tasks(args):
    """Run all ops; every thread of the team runs this."""
    num_ops, team_size = field(args, NUM_OPS), field(args, TEAM_SIZE)
    if team_size == 0 or call(team_size) == 1:
        for index in range(num_ops):
            _run_op(args, index)
        return
    state, sched_yield = args + 8 * STATE, field(args, SCHED_YIELD)
    index = _join(state)
    while index < num_ops:
        yields = _run_op(args, index)
        _leave(state, index, sched_yield)
        if yields != 0 and sched_yield != 0:
            # This thread is inside no op: while it has no core, the others go on without it.
            call(sched_yield)
        index = _join(state)


@njit
def _run_op(args, index):
    """Run an op; whether threads yield their cores behind it."""
    op = field(args, OPS) + 8 * OP_FIELDS * index
    run_kernel(field(op, KERNEL), field(op, ARGUMENTS))
    return field(op, YIELDS)


@njit
def _join(state):
    """Go inside the current op; its index."""
    return _fetch_add(state, 1) >> _INSIDE_BITS


@njit
def _leave(state, index, sched_yield):
    """Leave an op that has no tasks left, and wait until it has ended."""
    if _fetch_add(state, -1) & _INSIDE == 1:
        # A thread may join now, find no task and get here too: only one of them succeeds.
        _compare_exchange(state, index << _INSIDE_BITS, (index + 1) << _INSIDE_BITS)
    spins = 0
    while load_acquire(state) >> _INSIDE_BITS == index:
        pause()
        spins += 1
        if spins > _SPINS and sched_yield != 0:
            # The thread that is waited for may need this very core.
            call(sched_yield)


@intrinsic
def run_kernel(typingctx, kernel, kernel_args):
    """Call ``void kernel(int64 args)``."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), (simd.I64,))
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _fetch_add(typingctx, address, number):
    """Add to an int64 and return what it was, with acquire and release order."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _compare_exchange(typingctx, address, expected, number):
    """Write an int64 if it is what is expected."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], simd.I64.as_pointer())
        builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")

    return types.void(types.int64, types.int64, types.int64), codegen
