"""Entry points of the pruned argmax, for this CPU's instructions."""

from functools import cache

from kernels.cpu.linear.linear_kernel import wide_registers
from kernels.cpu.runtime.bf16_dot import BF16_DOT_TAGS, emulated_int8_dot_tag, int8_dot_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.cpu.sampling.pruned_argmax_arguments import PRUNED_ARGMAX_LAYOUT
from kernels.cpu.sampling.pruned_argmax_kernel import argmax_tasks, bound_tasks, quantize_tasks


def is_served(instructions: Instructions) -> bool:
    """Whether there are kernels for these instructions."""
    return instructions.dot == Dot.EMULATED or (
        instructions.dot == Dot.NATIVE and instructions.int8_dot
    )


@cache
def pruned_argmax_kernels(instructions: Instructions) -> tuple[Kernel, Kernel, Kernel]:
    """The kernels that quantize rows, bound their outputs, and find the argmax, in this order.

    Args:
        instructions: that are served.
    """
    int8_tag = emulated_int8_dot_tag if instructions.dot == Dot.EMULATED else int8_dot_tag
    bf16_tag = BF16_DOT_TAGS[instructions.dot]
    return (
        compile_kernel(quantize_tasks, PRUNED_ARGMAX_LAYOUT),
        compile_kernel(bound_tasks, PRUNED_ARGMAX_LAYOUT, int8_tag, wide_registers),
        compile_kernel(argmax_tasks, PRUNED_ARGMAX_LAYOUT, bf16_tag),
    )
