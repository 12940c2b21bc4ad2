"""Weights in the formats of GPTQ and AWQ: codes of the transposed weight [K, N] in 32-bit words.

The layouts are those that AutoGPTQ and AutoAWQ save, and GPTQModel after them. GPTQ packs
consecutive inputs into a word, AWQ consecutive outputs in an order of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.quantization.checkpoint_format import empty
from kernels.quantized_weight import QuantizedWeight
from shared.errors import ModelUnsupported

_FIELD = "quantization_config"
_OUTPUT_LAYERS = ("lm_head", "embed_out")
# Output of a group of eight in each place of a word, beginning with the lowest bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GptqFormat:
    """The linear layers of a checkpoint of GPTQ.

    Args:
        model_name: for errors.
        config: ``quantization_config`` in its config.json.

    Raises:
        ModelUnsupported: names the field and the value that are not served.
    """

    name = "gptq"

    def __init__(self, model_name: str, config: Mapping[str, Any]) -> None:
        self._fields = _Fields(model_name, config)
        self._bits = self._fields.one_of("bits", 4, 8)
        self._fields.one_of("is_marlin_format", None, False)
        self._fields.one_of("dynamic", None, {})
        self._fields.one_of("pack_dtype", None, "int32")
        self._has_output_layer = self._fields.one_of("lm_head", None, False, True)
        # The first version stores zero points minus one.
        version = self._fields.one_of("checkpoint_format", None, "gptq", "gptq_v2")
        self._zero_offset = 0 if version == "gptq_v2" else 1

    def stored(self, name: str, linear: nn.Linear) -> "_GptqWeight | None":
        """Words of codes and zero points, scales, and the group of each input."""
        if name.rpartition(".")[2] in _OUTPUT_LAYERS and not self._has_output_layer:
            return None
        outputs, inputs, group_size = self._fields.sizes(name, linear)
        return _GptqWeight(outputs, inputs, group_size, self._bits, self._zero_offset)


class AwqFormat:
    """The linear layers of a checkpoint of AWQ.

    Args:
        model_name: for errors.
        config: ``quantization_config`` in its config.json.

    Raises:
        ModelUnsupported: names the field and the value that are not served.
    """

    name = "awq"

    def __init__(self, model_name: str, config: Mapping[str, Any]) -> None:
        self._fields = _Fields(model_name, config)
        self._fields.one_of("bits", 4)
        self._fields.one_of("version", None, "gemm", "GEMM")
        self._fields.one_of("zero_point", None, True)
        self._skipped = tuple(config.get("modules_to_not_convert") or ())

    def stored(self, name: str, linear: nn.Linear) -> "_AwqWeight | None":
        """Words of codes and zero points, and scales."""
        if name.rpartition(".")[2] in _OUTPUT_LAYERS or any(each in name for each in self._skipped):
            return None
        return _AwqWeight(*self._fields.sizes(name, linear))


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a configuration, with the name of its model."""

    model_name: str
    config: Mapping[str, Any]

    def one_of(self, key: str, *served: Any) -> Any:
        """The value of a field; None if there is none."""
        value = self.config.get(key)
        if value not in served:
            raise ModelUnsupported(f"{self.model_name}: {_FIELD}.{key}={value!r} is not served")
        return value

    def sizes(self, name: str, linear: nn.Linear) -> tuple[int, int, int]:
        """Outputs, inputs and group size of a layer."""
        outputs, inputs = linear.weight.shape
        group_size = self.config.get("group_size")
        if group_size == -1:
            return outputs, inputs, inputs
        if not isinstance(group_size, int) or group_size < 1:
            reason = f"{_FIELD}.group_size={group_size!r} is not served"
            raise ModelUnsupported(f"{self.model_name}: {reason}")
        if inputs % group_size or inputs % 32 or outputs % 8:
            reason = f"{name} has {inputs} inputs and {outputs} outputs in groups of {group_size}"
            raise ModelUnsupported(f"{self.model_name}: {reason}, which is not served")
        return outputs, inputs, group_size


@dataclass(frozen=True, slots=True)
class _GptqWeight:
    """A weight of N outputs and K inputs."""

    outputs: int
    inputs: int
    group_size: int
    bits: int
    zero_offset: int

    @property
    def empty(self) -> Mapping[str, torch.Tensor]:
        """As AutoGPTQ names them."""
        codes, num_groups = 32 // self.bits, self.inputs // self.group_size
        return {
            "qweight": empty((self.inputs // codes, self.outputs), torch.int32),
            "qzeros": empty((num_groups, self.outputs // codes), torch.int32),
            "scales": empty((num_groups, self.outputs), torch.float32),
            "g_idx": empty((self.inputs,), torch.int32),
        }

    def quantized(self, found: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Unpacks codes and zero points.

        Raises:
            ValueError: the inputs of a group are not consecutive.
        """
        groups = found["g_idx"]
        if not torch.equal(
            groups, torch.arange(self.inputs, dtype=groups.dtype) // self.group_size
        ):
            raise ValueError("g_idx orders inputs by activation (desc_act), which is not served")
        codes = _unpacked(found["qweight"].T, self.bits)  # [N, K]
        zeros = _unpacked(found["qzeros"], self.bits).T + self.zero_offset
        return _made(codes, zeros, found["scales"].T, self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class _AwqWeight:
    """A weight of N outputs and K inputs in 4 bits."""

    outputs: int
    inputs: int
    group_size: int

    @property
    def empty(self) -> Mapping[str, torch.Tensor]:
        """As AutoAWQ names them."""
        num_groups = self.inputs // self.group_size
        return {
            "qweight": empty((self.inputs, self.outputs // 8), torch.int32),
            "qzeros": empty((num_groups, self.outputs // 8), torch.int32),
            "scales": empty((num_groups, self.outputs), torch.float32),
        }

    def quantized(self, found: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Unpacks codes and zero points, and puts outputs into their order."""
        codes, zeros = (_in_order(_unpacked(found[name], 4)).T for name in ("qweight", "qzeros"))
        return _made(codes, zeros, found["scales"].T, 4, self.group_size)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, codes] int16, of words [rows, words] int32 with the first in the lowest bits."""
    parts = words.contiguous().view(torch.uint8)  # little-endian, as safetensors are
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), 2).flatten(1)
    return parts.to(torch.int16)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, N] whose groups of eight are in the order of AWQ."""
    places = torch.tensor(_AWQ_ORDER).argsort()
    return codes.reshape(len(codes), -1, 8)[:, :, places].flatten(1)


def _made(
    codes: torch.Tensor,  # [N, K] int16, from 0
    zeros: torch.Tensor,  # [N, groups] int16, from 0
    scales: torch.Tensor,  # [N, groups]
    bits: int,
    group_size: int,
) -> QuantizedWeight:
    middle = 2 ** (bits - 1)
    scales = scales.contiguous()
    minimums = None if bool((zeros == middle).all()) else scales * (middle - zeros)
    signed = (codes - middle).to(torch.int8).contiguous()
    return QuantizedWeight(signed, scales, minimums, bits, group_size)
