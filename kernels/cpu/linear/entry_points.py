"""Entry points of the kernels of linear layers, for the instructions that this CPU has."""

from functools import cache

import torch

from kernels.cpu.elementwise.activation_kernel import activate_tasks
from kernels.cpu.elementwise.add_kernel import add_tasks
from kernels.cpu.elementwise.norm_kernel import layer_norm_tasks, norm_tasks
from kernels.cpu.elementwise.rotary_kernel import rotate_tasks
from kernels.cpu.linear.linear_kernel import linear_tasks, narrow_registers, wide_registers
from kernels.cpu.linear.unpack_kernel import unpack_tasks
from kernels.cpu.runtime.bf16_dot import emulated_pair_tag, pair_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_entry, element_tag, source_version
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.cpu.runtime.kernel_kinds import ACTIVATE, ADD, LINEAR, LOOKUP_OF_TOKENS, NORM, ROTARY
from kernels.cpu.runtime.simd import bfloat16_tag, float32_tag


@cache
def linear_kernel(weight: torch.dtype, dtype: torch.dtype, instructions: Instructions) -> Kernel:
    """Linear layers with packed weights of one type, inputs and outputs of another.

    Raises:
        ValueError: if there is no kernel for the types.
    """
    version = source_version()
    registers = wide_registers if instructions.wide else narrow_registers

    def linear_float32(job):
        if version:
            linear_tasks(job, float32_tag, float32_tag, float32_tag, registers)

    def linear_narrow_weights(job):
        if version:
            linear_tasks(job, bfloat16_tag, float32_tag, float32_tag, registers)

    def linear_bfloat16(job):
        if version:
            linear_tasks(job, bfloat16_tag, float32_tag, bfloat16_tag, registers)

    def linear_bfloat16_pairs(job):
        if version:
            linear_tasks(job, bfloat16_tag, pair_tag, bfloat16_tag, registers)

    def linear_bfloat16_emulated(job):
        if version:
            linear_tasks(job, bfloat16_tag, emulated_pair_tag, bfloat16_tag, registers)

    if (weight, dtype) == (torch.float32, torch.float32):
        return compile_entry(linear_float32, LINEAR)
    if (weight, dtype) == (torch.bfloat16, torch.float32):
        return compile_entry(linear_narrow_weights, LINEAR)
    if (weight, dtype) == (torch.bfloat16, torch.bfloat16):
        entries = {
            Dot.WIDENED: linear_bfloat16,
            Dot.NATIVE: linear_bfloat16_pairs,
            Dot.EMULATED: linear_bfloat16_emulated,
        }
        return compile_entry(entries[instructions.dot], LINEAR)
    raise ValueError(f"no CPU kernel for weights of {weight} and inputs of {dtype}")


@cache
def norm_kernel(dtype: torch.dtype) -> Kernel:
    """Root-mean-square normalization of elements of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def norm(job):
        if version:
            norm_tasks(job, tag)

    return compile_entry(norm, NORM)


@cache
def layer_norm_kernel(dtype: torch.dtype) -> Kernel:
    """Normalization of elements of this type by mean and variance.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def layer_norm(job):
        if version:
            layer_norm_tasks(job, tag)

    return compile_entry(layer_norm, NORM)


@cache
def rotary_kernel(dtype: torch.dtype) -> Kernel:
    """Rotary embeddings of elements of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def rotate(job):
        if version:
            rotate_tasks(job, tag)

    return compile_entry(rotate, ROTARY)


@cache
def add_kernel(dtype: torch.dtype) -> Kernel:
    """Sums of elements of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def add(job):
        if version:
            add_tasks(job, tag)

    return compile_entry(add, ADD)


@cache
def activate_kernel(dtype: torch.dtype) -> Kernel:
    """Activations of elements of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def activate(job):
        if version:
            activate_tasks(job, tag)

    return compile_entry(activate, ACTIVATE)


@cache
def unpack_kernel(weight: torch.dtype, dtype: torch.dtype) -> Kernel:
    """Rows of packed weights of one type, as elements of another.

    Raises:
        ValueError: if there is no kernel for the types.
    """
    version = source_version()
    weight_tag, tag = element_tag(weight), element_tag(dtype)

    def unpack(job):
        if version:
            unpack_tasks(job, weight_tag, tag)

    return compile_entry(unpack, LOOKUP_OF_TOKENS)
