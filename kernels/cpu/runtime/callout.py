"""A CPU kernel that calls a function: a captured graph can hold what is no kernel.

One thread of the team calls it; the others wait for the op to end, as for any other.
"""

from functools import cache

from numba import njit

from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.graph_executor import run_kernel
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.memory import claim_task, field

FUNCTION = 2  # address of ``void function(int64 args)``
INPUT, OUTPUT = 3, 4
ELEMENTS = 5
INPUT_TYPE, OUTPUT_TYPE = 6, 7  # numbers that the function gives a meaning
CALLOUT_LAYOUT = ArgumentLayout(8, rows=ELEMENTS)


@njit
def callout_tasks(args):
    """Call the function once with the arguments."""
    if claim_task(args) == 0:
        run_kernel(field(args, FUNCTION), args)


@cache
def callout_kernel() -> Kernel:
    """The kernel that calls a function."""
    return compile_kernel(callout_tasks, CALLOUT_LAYOUT)
