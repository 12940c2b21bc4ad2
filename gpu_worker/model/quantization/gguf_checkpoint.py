"""A GGUF file as a checkpoint of a transformers model.

Tensors are named, and the rows of rotary heads reordered, by transformers' own tables. A quantized
weight of a linear layer keeps its codes; what embeddings and other layers have is dequantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from gpu_worker.model.quantization.checkpoint_format import empty
from gpu_worker.model.quantization.ggml_blocks import BLOCK_TYPES, BlockType
from gpu_worker.model.quantization.gguf_config import make_config
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from kernels.quantized_weight import QuantizedWeight
from shared.errors import ModelUnsupported
from shared.gguf.header import GgufHeader, GgufTensor, read_header

# F32, F16 and BF16, which numpy has not.
_DENSE_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    30: np.dtype("<u2"),
}
# Factors of the frequencies of rotary embeddings, as Llama 3.1 has them.
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_ROWS_AT_ONCE = 4096  # of an embedding


class GgufCheckpoint:
    """The model in a GGUF file.

    Args:
        path: of the file.

    Attributes:
        config: of transformers.

    Raises:
        ModelUnsupported: the file is damaged, or has something that is not served.
    """

    name = "gguf"

    def __init__(self, path: Path) -> None:
        self._header = read_header(path)
        self._data = np.memmap(path, np.uint8, mode="c")
        self.config = make_config(self._header)
        self._model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        for tensor in self._header.tensors.values():
            self._check(tensor)
        # Copies of the configuration: a model may change it.
        with torch.device("meta"):
            skeleton = self._model_class(type(self.config).from_dict(self.config.to_dict()))
        self._names, self._processor = _tables(self._header, skeleton)
        # Linear layers, by the names of their weights.
        self._linears = {
            f"{name}.weight"
            for name, module in skeleton.named_modules()
            if type(module) is nn.Linear
        }

    def load(self, dtype: torch.dtype, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model by transformers' loading, and its report.

        Args:
            dtype: of what is dequantized.
            arguments: for ``from_pretrained``.
        """
        made: tuple[Any, dict[str, Any]] = self._model_class.from_pretrained(
            None, state_dict=self._tensors(dtype), **arguments
        )
        return made

    def _tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors by transformers' names; quantized ones of linear layers are bytes."""
        found = {}
        for name, tensor in self._header.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            target = self._names.get(name, name)
            kind = BLOCK_TYPES.get(tensor.type_id)
            rows = self._processor.process(self._rows(tensor), name=name).weights
            made = torch.from_numpy(np.ascontiguousarray(rows))
            if kind is not None and target not in self._linears:
                made = _dequantized(made, kind, dtype)
            found[target] = made.view(torch.bfloat16) if made.dtype == torch.uint16 else made
        return found

    def stored(self, name: str, linear: nn.Linear) -> "_BlockWeight | None":
        """The bytes of a layer's blocks."""
        tensor = self._tensor_of(f"{name}.weight")
        kind = None if tensor is None else BLOCK_TYPES.get(tensor.type_id)
        if kind is None:
            return None
        outputs, inputs = linear.weight.shape
        row_bytes = kind.row_bytes(inputs)
        if row_bytes is None:
            reason = f"{name} has {inputs} inputs, no multiple of the blocks of {kind.name}"
            raise ModelUnsupported(f"{self._header.path}: {reason}")
        return _BlockWeight(outputs, row_bytes, kind)

    @torch.no_grad()
    def finish(self, model: Any) -> None:
        """Set what transformers does not load: factors of frequencies, and the output layer.

        Where the output layer has the embedding's weight, and that is quantized, it gets the codes.

        Raises:
            ModelUnsupported: the model has no such frequencies.
        """
        if _ROPE_FACTORS in self._header.tensors:
            factors = torch.from_numpy(self._rows(self._header.tensors[_ROPE_FACTORS]).copy())
            _divide_frequencies(self._header, model, factors)
        embedding = self._header.tensors.get(_EMBEDDING)
        if embedding is None or not self.config.tie_word_embeddings:
            return
        kind = BLOCK_TYPES.get(embedding.type_id)
        if kind is not None:
            rows = torch.from_numpy(self._rows(embedding))
            model.set_output_embeddings(QuantizedLinear(kind.quantized(rows)))

    def _tensor_of(self, target: str) -> GgufTensor | None:
        for name, found in self._names.items():
            if found == target:
                return self._header.tensors.get(name)
        return None

    def _check(self, tensor: GgufTensor) -> None:
        """Refuse tensors of types that are not served, and those beyond the end of the file."""
        end = tensor.offset + self._num_bytes(tensor)
        if end > self._header.num_bytes:
            reason = f"it has {self._header.num_bytes} bytes, and {tensor.name} ends at {end}"
            raise ModelUnsupported(
                f"{self._header.path}: the file is incomplete: {reason}; copy or download it again"
            )

    def _num_bytes(self, tensor: GgufTensor) -> int:
        if tensor.type_id in _DENSE_TYPES:
            return tensor.num_elements * _DENSE_TYPES[tensor.type_id].itemsize
        kind = BLOCK_TYPES.get(tensor.type_id)
        row_bytes = None if kind is None else kind.row_bytes(tensor.shape[-1])
        if kind is None or row_bytes is None:
            served = ", ".join(each.name for each in BLOCK_TYPES.values())
            what = f"{tensor.name} has the type {_type_name(tensor.type_id)}"
            reason = f"{what}, which is not served; served are F32, F16, BF16, {served}"
            raise ModelUnsupported(f"{self._header.path}: {reason}")
        return tensor.num_elements // tensor.shape[-1] * row_bytes

    def _rows(self, tensor: GgufTensor) -> Any:
        """A view of the file: numbers in their shape, or bytes [rows, bytes of a row]."""
        part = self._data[tensor.offset : tensor.offset + self._num_bytes(tensor)]
        if tensor.type_id in _DENSE_TYPES:
            return part.view(_DENSE_TYPES[tensor.type_id]).reshape(tensor.shape)
        return part.reshape(tensor.num_elements // tensor.shape[-1], -1)


@dataclass(frozen=True, slots=True)
class _BlockWeight:
    """A weight in blocks of one type."""

    outputs: int
    row_bytes: int
    kind: BlockType

    @property
    def empty(self) -> Mapping[str, torch.Tensor]:
        """Bytes, under the name of the weight."""
        return {"weight": empty((self.outputs, self.row_bytes), torch.uint8)}

    def quantized(self, found: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Takes the blocks apart."""
        return self.kind.quantized(found["weight"])


def _tables(header: GgufHeader, skeleton: Any) -> tuple[dict[str, str], Any]:
    """transformers' names by those in the file, and its reordering of a tensor's rows."""
    try:
        import gguf  # noqa: F401 (transformers imports it in the functions below)
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
    except ImportError as error:
        reason = f"GGUF files need the package gguf, and its tables in transformers ({error})"
        raise ModelUnsupported(f"{header.path}: {reason}") from error
    make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor = make(config=skeleton.config.to_dict())
    names = get_gguf_hf_weights_map(skeleton, processor, model_type=header.architecture)
    return names, processor


def _dequantized(rows: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, K] in bytes [N, bytes of a row], with few of them in float32 at once."""
    first = kind.quantized(rows[:1])
    made = torch.empty(len(rows), first.shape[1], dtype=dtype)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[begin : begin + _ROWS_AT_ONCE]
        made[begin : begin + len(part)] = kind.quantized(part).dequantize()
    return made


def _divide_frequencies(header: GgufHeader, model: Any, factors: torch.Tensor) -> None:
    found = False
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in ("inv_freq", "original_inv_freq") and buffer.shape == factors.shape:
                buffer.copy_(buffer / factors)
                found = True
    if not found:
        shape = list(factors.shape)
        raise ModelUnsupported(f"{header.path}: {_ROPE_FACTORS} {shape} fits no rotary embedding")


def _type_name(type_id: int) -> str:
    import gguf

    try:
        return f"{gguf.GGMLQuantizationType(type_id).name} ({type_id})"
    except ValueError:
        return str(type_id)
