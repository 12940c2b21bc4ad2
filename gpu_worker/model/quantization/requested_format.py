"""Quantizes a model's linear layers at load, or dequantizes them, as ``--quantization`` says.

Weights of decoder layers and of the output layer are quantized, each output in groups of
consecutive inputs. The output layer is always in 8 bits: it decides between tokens whose logits are
nearly equal. Embeddings, also one that is tied to the output layer, keep their own weights: a step
reads few of their rows. So do layers that choose experts.
"""

import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.fusion.module_matching import places, reads_weights
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from kernels.quantized_weight import QuantizedWeight, fitting_group_size, quantize
from shared.errors import SettingsError
from shared.logs import EventLog

NONE, INT8, INT4 = "none", "int8", "int4"
FORMATS = (NONE, INT8, INT4)

_SETTING = "--quantization"
_GROUP_SIZES = {8: 64, 4: 32}  # by bits: inputs that share a scale
_CHOOSE_EXPERTS = ("gate", "router")

log = EventLog(__name__)


def check_device(wanted: str | None, device: torch.device) -> None:
    """Refuse to quantize where that would only make steps slower.

    Raises:
        SettingsError: names the device.
    """
    if wanted in (INT8, INT4) and device.type != "cpu":
        reason = f"not on {device}: there are no kernels for such weights, so steps would be slower"
        raise SettingsError(_SETTING, wanted, reason)


@torch.no_grad()
def apply_quantization(model: nn.Module, wanted: str | None) -> str:
    """Quantize or dequantize linear layers in place; returns the format of the model's weights.

    Args:
        model: of transformers; its linear layers may be quantized already.
        wanted: one of FORMATS; None: leave the layers as they are.

    Raises:
        SettingsError: the weights cannot have this format.
    """
    own = _own_format(model)
    if wanted == NONE and own is not None:
        _dequantize(model)
        return NONE
    if wanted in (None, NONE):
        return own or NONE
    if own is not None:
        reason = f"the weights are in {own} already; take auto, or a model that is not quantized"
        raise SettingsError(_SETTING, wanted, reason)
    assert wanted is not None
    began = time.monotonic()
    done = _Quantizer(8 if wanted == INT8 else 4).run(model)
    if not done.layers:
        raise SettingsError(_SETTING, wanted, "the model has no linear layers for that")
    log.info(
        "weights quantized",
        format=wanted,
        layers=done.layers,
        bytes_before=done.bytes_before,
        weights=done.weights,
        kept=", ".join(f"{name} ({count})" for name, count in done.kept.items()) or None,
        seconds=round(time.monotonic() - began, 1),
    )
    return wanted


def _own_format(model: nn.Module) -> str | None:
    """The format of most quantized layers; None: there are none."""
    layers: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            weight = module.quantized
            name = f"int{weight.bits}" + (" with int8 inputs" if weight.rounds_rows else "")
            layers[name] += 1
    return layers.most_common(1)[0][0] if layers else None


def _dequantize(model: nn.Module) -> None:
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    for parent, name, module in places(model):
        if not isinstance(module, QuantizedLinear):
            continue
        wide: Any = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        weight = module.quantized.dequantize().to(dtype)
        wide.weight = nn.Parameter(weight, requires_grad=False)
        wide.bias = module.bias
        setattr(parent, name, wide)


class _Quantizer:
    """Quantizes layers and counts them."""

    def __init__(self, bits: int) -> None:
        self.layers = 0
        self.weights = 0
        self.bytes_before = 0
        self.kept: Counter[str] = Counter()  # by name
        self._bits = bits

    def run(self, model: Any) -> "_Quantizer":
        head = model.get_output_embeddings()
        in_layers = {
            module
            for parent in model.modules()
            if isinstance(parent, nn.ModuleList)
            for module in parent.modules()
        }
        for parent, name, module in places(model):
            if type(module) not in (nn.Linear, Conv1D):
                continue
            bits = 8 if module is head else self._bits
            served = module is head or module in in_layers
            made = self._quantized(module, bits) if served and _may_change(parent, name) else None
            if made is None:
                self.kept[name] += 1
            else:
                setattr(parent, name, made)
        return self

    def _quantized(self, module: Any, bits: int) -> QuantizedLinear | None:
        """The layer in few bits; None: its inputs form no groups."""
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        made = quantized_weight(weight, bits)
        if made is None:
            return None
        self.layers += 1
        self.weights += weight.numel()
        self.bytes_before += weight.nbytes
        return QuantizedLinear(made, module.bias)


def _may_change(parent: nn.Module, name: str) -> bool:
    return name not in _CHOOSE_EXPERTS and not reads_weights(parent)


def quantized_weight(
    weight: torch.Tensor,  # [N, K]
    bits: int,
) -> QuantizedWeight | None:
    """A weight as it is quantized at load; None: its inputs form no groups."""
    size = fitting_group_size(weight.shape[1], _GROUP_SIZES[bits])
    return None if size is None else quantize(weight, bits, size, symmetric=bits == 8)
