"""Loads a rank's part of a model: no rank has all of it in memory, not even at load."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GenerationConfig

from gpu_worker.model.attention import ATTENTION_NAME
from gpu_worker.model.split.layer_split import LayerSplit, split_layers
from gpu_worker.model.split.stored_weights import StoredWeights, set_parameter
from gpu_worker.ranks.member import Member
from gpu_worker.ranks.reducer import Reducer, SummedOutput
from shared.errors import ModelUnsupported


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

    Attributes:
        model: of transformers, without weights until ``load``.
    """

    def __init__(
        self, path: str, config: Any, dtype: torch.dtype, member: Member, trust_remote_code: bool
    ) -> None:
        if getattr(config, "quantization_config", None) is not None:
            raise ModelUnsupported(f"{path}: quantized weights are not split over workers")
        self.model: Any = build_without_weights(config, dtype, trust_remote_code)
        self._path = path
        self._dtype = dtype
        self._stored = StoredWeights(path, self.model)
        self._shapes = {name: weight.shape for name, weight in self.model.named_parameters()}
        self._split: LayerSplit = split_layers(self.model, member)

    def load(self) -> dict[str, Any]:
        """Read this rank's part of each weight; the report that ``refuse_other_tensors`` judges."""
        missing: list[str] = []
        mismatched: list[tuple[str, list[int], list[int]]] = []
        used: set[str] = set()
        for name, whole in self._shapes.items():
            stored = self._stored.stored_name(name)
            if stored is None:
                missing.append(name)
                continue
            used.add(stored)
            if (given := self._stored.shape(stored)) != list(whole):
                mismatched.append((name, given, list(whole)))
                continue
            set_parameter(self.model, name, self._read(name, stored, whole))
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

    def _read(self, name: str, stored: str, whole: torch.Size) -> torch.Tensor:
        part = self._split.parts.get(name)
        if part is not None and part.is_zero:
            return torch.zeros(part.shape(whole), dtype=self._dtype)
        return self._stored.read(stored, part, self._dtype)

    def _tied_names(self) -> set[str]:
        """Names in the files of weights that the model shares with others."""
        all_ = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        found = (self._stored.stored_name(name) for name in all_)
        return {name for name in found if name is not None}
