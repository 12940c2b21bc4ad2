"""Entry points of the kernels that find the likeliest outputs, for this CPU's instructions."""

from functools import cache

from kernels.cpu.linear.linear_kernel import wide_registers
from kernels.cpu.runtime.bf16_dot import emulated_four_tag, emulated_pair_tag, four_tag, pair_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_entry, source_version
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.cpu.runtime.kernel_kinds import SCREEN
from kernels.cpu.sampling.pruned_argmax_kernel import bound_tasks, choose_tasks, code_tasks


def is_served(instructions: Instructions) -> bool:
    """Whether there are kernels for these instructions."""
    return instructions.dot == Dot.EMULATED or (
        instructions.dot == Dot.NATIVE and instructions.fours
    )


@cache
def screen_kernels(instructions: Instructions) -> tuple[Kernel, Kernel, Kernel]:
    """What codes rows, what bounds their outputs, and what chooses among them.

    Args:
        instructions: that are served.
    """
    version = source_version()

    def code(job):
        if version:
            code_tasks(job)

    def bound(job):
        if version:
            bound_tasks(job, four_tag, wide_registers)

    def bound_emulated(job):
        if version:
            bound_tasks(job, emulated_four_tag, wide_registers)

    def choose(job):
        if version:
            choose_tasks(job, pair_tag)

    def choose_emulated(job):
        if version:
            choose_tasks(job, emulated_pair_tag)

    emulated = instructions.dot == Dot.EMULATED
    return (
        compile_entry(code, SCREEN),
        compile_entry(bound_emulated if emulated else bound, SCREEN),
        compile_entry(choose_emulated if emulated else choose, SCREEN),
    )
