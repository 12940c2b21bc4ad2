"""Weights in the format of the library compressed-tensors: W8A8 in int8, W8A16, W4A16.

The library reads the configuration, decides which layer has which scheme, and unpacks codes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.quantization.checkpoint_format import empty
from kernels.quantized_weight import QuantizedWeight
from shared.errors import ModelUnsupported

_FIELD = "quantization_config"
_PACKED, _PLAIN = "pack-quantized", ("int-quantized", "naive-quantized")
# Parts of a configuration that change what the weights mean, and values that mean nothing.
_EXTRAS = ("sparsity_config", "transform_config", "kv_cache_scheme", "moe_sparsity_config")
_NOTHING: tuple[Any, ...] = (None, {}, [], {"format": "dense"})


class CompressedTensorsFormat:
    """The linear layers of a checkpoint of compressed-tensors.

    Args:
        model_name: for errors.
        config: ``quantization_config`` in its config.json.

    Raises:
        ModelUnsupported: names the field and the value that are not served.
    """

    name = "compressed-tensors"

    def __init__(self, model_name: str, config: Mapping[str, Any]) -> None:
        try:
            from compressed_tensors.quantization import QuantizationConfig
        except ImportError as error:
            reason = f"quant_method={self.name!r} needs the package compressed-tensors ({error})"
            raise ModelUnsupported(f"{model_name}: {_FIELD}.{reason}") from error
        self._model_name = model_name
        for key in _EXTRAS:
            if config.get(key) not in _NOTHING:
                raise self._refusal(key, config[key])
        try:
            self._config = QuantizationConfig.model_validate(dict(config))
        except Exception as error:  # pydantic's, and those of the library's validators
            reason = " ".join(str(error).split())
            raise ModelUnsupported(f"{model_name}: {_FIELD} cannot be used: {reason}") from error
        status = self._config.quantization_status.value
        if status != "compressed":
            raise self._refusal("quantization_status", status)
        for name, scheme in self._config.config_groups.items():
            for key, value in self._unserved(scheme):
                raise self._refusal(f"config_groups.{name}.{key}", value)

    def stored(self, name: str, linear: nn.Linear) -> "_CompressedWeight | None":
        """The tensors that the library saves for a layer."""
        from compressed_tensors.utils.match import is_match

        for scheme in self._config.config_groups.values():
            if is_match(name, linear, scheme.targets, self._config.ignore or ()):
                break
        else:
            return None
        outputs, inputs = linear.weight.shape
        group_size = scheme.weights.group_size or inputs
        if inputs % group_size:
            reason = f"{name} has {inputs} inputs, no multiple of its group_size={group_size}"
            raise ModelUnsupported(f"{self._model_name}: {reason}")
        return _CompressedWeight(
            outputs,
            inputs,
            group_size,
            scheme.weights.num_bits,
            is_packed=self._form(scheme) == _PACKED,
            has_zeros=not scheme.weights.symmetric,
            input_group=None if scheme.input_activations is None else inputs,
        )

    def _form(self, scheme: Any) -> str:
        return str(getattr(scheme.format, "value", scheme.format) or self._config.format)

    def _unserved(self, scheme: Any) -> Iterator[tuple[str, object]]:
        """Fields of a scheme that are not served, with their values."""
        if scheme.weights is None:
            yield "weights", None
            return
        if self._form(scheme) not in (_PACKED, *_PLAIN):
            yield "format", self._form(scheme)
        yield from _unlike("weights", scheme.weights, type=("int",), num_bits=(4, 8))
        yield from _unlike("weights", scheme.weights, strategy=("channel", "group"))
        yield from _unlike("weights", scheme.weights, dynamic=(False,))
        yield from _unlike("weights", scheme.weights, actorder=(None, "weight"))
        if scheme.input_activations is not None:
            inputs = scheme.input_activations
            yield from _unlike("input_activations", inputs, type=("int",), num_bits=(8,))
            yield from _unlike("input_activations", inputs, dynamic=(True,), strategy=("token",))
            yield from _unlike("input_activations", inputs, symmetric=(True,))
        if scheme.output_activations is not None:
            yield "output_activations", scheme.output_activations.model_dump()

    def _refusal(self, field: str, value: object) -> ModelUnsupported:
        return ModelUnsupported(f"{self._model_name}: {_FIELD}.{field}={value!r} is not served")


def _unlike(part: str, arguments: Any, **served: tuple[Any, ...]) -> Iterator[tuple[str, object]]:
    """Fields that have none of the values that are served."""
    for key, values in served.items():
        value = getattr(arguments, key)
        value = getattr(value, "value", value)
        if value not in values:
            yield f"{part}.{key}", value


@dataclass(frozen=True, slots=True)
class _CompressedWeight:
    """A weight of N outputs and K inputs, in codes of one byte or packed into words."""

    outputs: int
    inputs: int
    group_size: int
    bits: int
    is_packed: bool
    has_zeros: bool
    input_group: int | None

    @property
    def empty(self) -> Mapping[str, torch.Tensor]:
        """As the library names them."""
        num_groups = self.inputs // self.group_size
        made = {"weight_scale": empty((self.outputs, num_groups), torch.float32)}
        if self.is_packed:
            made["weight_packed"] = empty((self.outputs, self._words(self.inputs)), torch.int32)
            made["weight_shape"] = empty((2,), torch.int64)
        else:
            made["weight"] = empty((self.outputs, self.inputs), torch.int8)
        if self.has_zeros and self.is_packed:
            made["weight_zero_point"] = empty((self._words(self.outputs), num_groups), torch.int32)
        elif self.has_zeros:
            made["weight_zero_point"] = empty((self.outputs, num_groups), torch.int8)
        return made

    def quantized(self, found: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Unpacks with the library's own function; zero points become minimums."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        scales, zeros = found["weight_scale"], found.get("weight_zero_point")
        if self.is_packed:
            shape = tuple(found["weight_shape"].tolist())
            if shape != (self.outputs, self.inputs):
                raise ValueError(f"weight_shape={shape}: expected {(self.outputs, self.inputs)}")
            codes = unpack_from_int32(found["weight_packed"], self.bits, torch.Size(shape))
            if zeros is not None:
                zeros = unpack_from_int32(zeros, self.bits, scales.shape, packed_dim=0)
        else:
            codes = found["weight"]
        minimums = None if zeros is None else -scales * zeros
        return QuantizedWeight(
            codes.contiguous(), scales, minimums, self.bits, self.group_size, self.input_group
        )

    def _words(self, codes: int) -> int:
        """Words of 32 bits that so many codes take."""
        return -(-codes * self.bits // 32)
