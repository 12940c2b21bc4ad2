"""Decides whether inputs of linear layers with quantized weights are rounded to 8 bits, too."""

import torch
from torch import nn

from gpu_worker.model.quantization.quantized_linear import QuantizedLinear


def round_inputs(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Round inputs where kernels multiply bytes; returns the number of layers that do.

    Such kernels multiply twice as many numbers at once as those for bfloat16. Inputs are rounded in
    small groups, each with its own scale, as llama.cpp does for all of its formats. The model's own
    layers do so as well, so that they are what kernels are compared with. In float32 nothing is
    rounded, nor where a checkpoint has rounded its inputs itself.

    Args:
        model: its linear layers may be quantized.
        dtype: of the model.
        device: of the model.
    """
    if device.type != "cpu":
        return 0
    from kernels.cpu.quantized.quantized_packing import multiplies_bytes  # it imports numba
    from kernels.cpu.runtime.instruction_set import detect

    instructions = detect()
    if instructions is None or not multiplies_bytes(dtype, instructions):
        return 0
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    for each in layers:
        each.round_inputs()
    return len(layers)
