"""Entry points of the pruned argmax, for this CPU's instructions."""

from functools import cache

from kernels.cpu.linear.linear_kernel import wide_registers
from kernels.cpu.runtime.bf16_dot import emulated_four_tag, emulated_pair_tag, four_tag, pair_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_entry, source_version
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.cpu.runtime.kernel_kinds import PRUNED_ARGMAX
from kernels.cpu.sampling.pruned_argmax_kernel import argmax_tasks, bound_tasks, quantize_tasks


def is_served(instructions: Instructions) -> bool:
    """Whether there are kernels for these instructions."""
    return instructions.dot == Dot.EMULATED or (
        instructions.dot == Dot.NATIVE and instructions.fours
    )


@cache
def pruned_argmax_kernels(instructions: Instructions) -> tuple[Kernel, Kernel, Kernel]:
    """The kernels that quantize rows, bound their outputs, and find the argmax, in this order.

    Args:
        instructions: that are served.
    """
    version = source_version()

    def quantize(arguments):
        if version:
            quantize_tasks(arguments)

    def bound(arguments):
        if version:
            bound_tasks(arguments, four_tag, wide_registers)

    def bound_emulated(arguments):
        if version:
            bound_tasks(arguments, emulated_four_tag, wide_registers)

    def argmax(arguments):
        if version:
            argmax_tasks(arguments, pair_tag)

    def argmax_emulated(arguments):
        if version:
            argmax_tasks(arguments, emulated_pair_tag)

    emulated = instructions.dot == Dot.EMULATED
    return (
        compile_entry(quantize, PRUNED_ARGMAX),
        compile_entry(bound_emulated if emulated else bound, PRUNED_ARGMAX),
        compile_entry(argmax_emulated if emulated else argmax, PRUNED_ARGMAX),
    )
