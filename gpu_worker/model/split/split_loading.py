"""Loads a rank's part of a model: no rank has all of it in memory, not even at load."""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GenerationConfig

from gpu_worker.model.attention import ATTENTION_NAME
from gpu_worker.model.quantization.checkpoint_format import CheckpointFormat
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.split.layer_split import LayerSplit, split_layers
from gpu_worker.model.split.stored_weights import StoredWeights, set_parameter
from gpu_worker.model.split.weight_part import Part
from gpu_worker.ranks.member import Member
from gpu_worker.ranks.reducer import Reducer, SummedOutput
from shared.errors import ModelUnsupported
from shared.logs import EventLog

log = EventLog(__name__)


class _WithoutWeights(TorchFunctionMode):
    """Inside the block, ``torch.empty`` allocates nothing: layers are made without weights.

    Buffers, such as the frequencies of rotary embeddings, are computed and no empty tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_without_weights(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A model of transformers whose weights are not allocated."""
    with _WithoutWeights():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelUnsupported(f"{name} cannot be computed without the model's weights")
    return model.eval().requires_grad_(False)


class SplitModel:
    """A model of which this rank has a part.

    Args:
        path: folder or hub id of the model.
        config: of the model.
        dtype: of its weights.
        member: rank and number of ranks.
        trust_remote_code: run code that comes with the model.
        checkpoint: the format of quantized linear layers; None: there are none.

    Attributes:
        model: of transformers, without weights until ``load``.
    """

    def __init__(
        self,
        path: str,
        config: Any,
        dtype: torch.dtype,
        member: Member,
        trust_remote_code: bool,
        checkpoint: CheckpointFormat | None = None,
    ) -> None:
        self.model: Any = build_without_weights(config, dtype, trust_remote_code)
        self._path = path
        self._dtype = dtype
        self._stored = StoredWeights(path, self.model, checkpoint)
        self._shapes = {name: weight.shape for name, weight in self.model.named_parameters()}
        self._split: LayerSplit = split_layers(self.model, member)
        if self._split.uneven is not None:
            heads, kv_heads = self._split.uneven
            because = "the rank with most heads takes longest, and KV memory is as much on all"
            log.warning("heads are split unevenly", heads=heads, kv_heads=kv_heads, because=because)

    def weight_bytes(self) -> int:
        """Memory of this rank's part."""
        return sum(self._bytes_of(name, whole) for name, whole in self._shapes.items())

    def _bytes_of(self, name: str, whole: torch.Size) -> int:
        part = self._split.parts.get(name)
        size = prod(whole if part is None else part.shape(whole))
        stored = self._stored.quantized.get(name.removesuffix(".weight"))
        if stored is None:
            return size * self._dtype.itemsize
        total = sum(each.numel() * each.itemsize for each in stored.empty.values())
        return total * size // whole.numel()

    def load(self) -> dict[str, Any]:
        """Read this rank's part of each weight; the report that ``refuse_other_tensors`` judges."""
        missing: list[str] = []
        mismatched: list[tuple[str, list[int], list[int]]] = []
        used: set[str] = set()
        for name, whole in self._shapes.items():
            layer = name.removesuffix(".weight")
            tensors = {name: whole}
            if layer in self._stored.quantized:
                empty = self._stored.quantized[layer].empty
                tensors = {f"{layer}.{key}": each.shape for key, each in empty.items()}
            num_faults = len(missing) + len(mismatched)
            for each, shape in tensors.items():
                stored = self._stored.stored_name(each)
                if stored is None:
                    missing.append(each)
                    continue
                used.add(stored)
                if (given := self._stored.shape(stored)) != list(shape):
                    mismatched.append((each, given, list(shape)))
            if len(missing) + len(mismatched) == num_faults:
                self._load(name, layer, whole)
        self.model.tie_weights()
        with suppress(OSError):  # a model need not have one
            self.model.generation_config = GenerationConfig.from_pretrained(
                self._path, local_files_only=True
            )
        tied = {name for name, weight in self.model.named_parameters() if not weight.is_meta}
        return {
            "missing_keys": [name for name in missing if name not in tied],
            "unexpected_keys": self._stored.names() - used - self._tied_names(),
            "mismatched_keys": mismatched,
        }

    def add_sums(self, reducer: Reducer) -> None:
        """Put the sums over all ranks behind the layers that compute a part of them."""
        for parent, name in self._split.summed:
            inner: nn.Module = getattr(parent, name)
            setattr(parent, name, SummedOutput(inner, reducer, self._dtype))

    def _load(self, name: str, layer: str, whole: torch.Size) -> None:
        """Put this rank's part of a weight, all of which is in the files, into the model."""
        part = self._split.parts.get(name)
        if layer in self._stored.quantized:
            self._load_quantized(layer, part)
        elif part is not None and part.is_zero:
            zeros = torch.zeros(part.shape(whole), dtype=self._dtype)
            set_parameter(self.model, name, zeros)
        else:
            stored = self._stored.stored_name(name)
            assert stored is not None, name
            set_parameter(self.model, name, self._stored.read(stored, part, self._dtype))

    def _load_quantized(self, layer: str, part: Part | None) -> None:
        weight = self._stored.read_quantized(layer)
        if part is not None:
            try:
                weight = part.of_quantized(weight)
            except ValueError as error:
                raise ModelUnsupported(f"{self._path}: {layer}: {error}") from error
        linear: Any = self.model.get_submodule(layer)
        self.model.set_submodule(layer, QuantizedLinear(weight, linear.bias))

    def _tied_names(self) -> set[str]:
        """Names in the files of weights that the model shares with others."""
        all_ = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        found = (self._stored.stored_name(name) for name in all_)
        return {name for name in found if name is not None}
