"""Reads single weights, or parts of them, from a model's safetensors files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from gpu_worker.model.quantization.checkpoint_format import CheckpointFormat, StoredWeight
from gpu_worker.model.split.weight_part import Part
from kernels.quantized_weight import QuantizedWeight
from shared.errors import ModelUnsupported

_INDEX = "model.safetensors.index.json"


class StoredWeights:
    """The weights in the files of a model.

    Args:
        path: its folder or hub id.
        model: of transformers; names in its files may lack its prefix, or be older ones.
        checkpoint: the format of quantized linear layers; None: there are none.

    Attributes:
        quantized: how the weights of such layers are stored, by the layer's name.

    Raises:
        ModelUnsupported: there are no such files, or one is damaged.
    """

    def __init__(self, path: str, model: Any, checkpoint: CheckpointFormat | None = None) -> None:
        self.quantized = {} if checkpoint is None else _quantized_layers(model, checkpoint)
        prefix = model.base_model_prefix
        self._prefix = f"{prefix}." if prefix else ""
        self.folder = Path(path)
        if not self.folder.is_dir():
            self.folder = Path(snapshot_download(path, local_files_only=True))
        self._files: dict[str, Any] = {}
        self._place: dict[str, str] = {}  # file of each name
        try:
            for name, file in self._names():
                self._place[name] = file
        except (OSError, ValueError, SafetensorError) as error:
            reason = f"{path}: a file of weights is damaged or incomplete ({error})"
            raise ModelUnsupported(f"{reason}; copy or download it again") from error
        renamings = [
            each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)
        ]
        self._stored_as = {_renamed(name, renamings): name for name in self._place}
        if not self._place:
            raise ModelUnsupported(
                f"{path}: --tensor-parallel-size needs weights in safetensors files"
            )

    def _names(self) -> Iterator[tuple[str, str]]:
        index = self.folder / _INDEX
        if index.is_file():
            yield from json.loads(index.read_text())["weight_map"].items()
            return
        for path in sorted(self.folder.glob("*.safetensors")):
            yield from ((name, path.name) for name in self._file(path.name).keys())  # noqa: SIM118

    def names(self) -> set[str]:
        """Names as they are in the files."""
        return set(self._place)

    def stored_name(self, name: str) -> str | None:
        """The name in the files of a parameter of the model; None: there is none."""
        bare = name.removeprefix(self._prefix)
        for found in (name, bare, self._prefix + name):
            if found in self._stored_as:
                return self._stored_as[found]
        return None

    def shape(self, stored: str) -> list[int]:
        """The shape of a whole weight in the files."""
        shape: list[int] = self._slice(stored).get_shape()
        return shape

    def read(self, stored: str, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        """A weight, or a part of it, in another type."""
        found = self._slice(stored)
        read: torch.Tensor = found[:] if part is None else part.read(found)
        return read.to(dtype, copy=True)  # files stay mapped as long as a view of them lives

    def read_quantized(self, layer: str) -> QuantizedWeight:
        """The whole weight of a quantized layer, all of whose tensors are there.

        Raises:
            ModelUnsupported: its tensors have values that are not served.
        """
        found = {}
        for key, empty in self.quantized[layer].empty.items():
            stored = self.stored_name(f"{layer}.{key}")
            assert stored is not None, key
            found[key] = self.read(stored, None, empty.dtype)
        try:
            return self.quantized[layer].quantized(found)
        except ValueError as error:
            raise ModelUnsupported(f"{self.folder}: {layer}: {error}") from error

    def fill(
        self, module: nn.Module, prefix: str, dtype: torch.dtype, dequantized: torch.dtype
    ) -> None:
        """Replace all parameters of a module, whose names begin with ``prefix``, by whole ones.

        Args:
            dtype: of weights that are not quantized.
            dequantized: of those that are.
        """
        for name, _ in list(module.named_parameters()):
            layer = f"{prefix}.{name}".removesuffix(".weight")
            if layer in self.quantized:
                whole = self.read_quantized(layer).dequantize().to(dequantized)
            else:
                stored = self.stored_name(f"{prefix}.{name}")
                assert stored is not None, name
                whole = self.read(stored, None, dtype)
            set_parameter(module, name, whole)

    def _slice(self, stored: str) -> Any:
        return self._file(self._place[stored]).get_slice(stored)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, framework="pt")
        return self._files[name]


def _quantized_layers(model: Any, checkpoint: CheckpointFormat) -> dict[str, StoredWeight]:
    linears = ((name, each) for name, each in model.named_modules() if type(each) is nn.Linear)
    found = ((name, checkpoint.stored(name, linear)) for name, linear in linears)
    return {name: stored for name, stored in found if stored is not None}


def _renamed(name: str, renamings: Sequence[WeightRenaming]) -> str:
    """The name that transformers has today for a weight in a file."""
    for each in renamings:
        name = each.rename_source_key(name)[0]
    return name


def set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter of a module or of one below it."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
