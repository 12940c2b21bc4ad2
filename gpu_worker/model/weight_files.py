"""Refuses a model whose files lack weights, hold others, or hold NaN or infinite values."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from shared.errors import ModelUnsupported

# Buffers that older versions of transformers saved, and that are computed from the configuration.
_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|masked_bias|position_ids"
    r"|(attn|attention)\.bias)$"
)
_MOST_NAMES = 8  # in an error


def stored_bytes(model: str) -> int:
    """Bytes of a model's safetensors files, as far as they are on this machine.

    Args:
        model: folder or hub id.
    """
    folder = Path(model)
    if not folder.is_dir():
        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return 0
        folder = Path(config).parent
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def refuse_other_tensors(model: str, found: Mapping[str, Any]) -> None:
    """Refuse a model whose files and configuration do not fit together.

    Args:
        model: its folder or hub id, for errors.
        found: transformers' report on loading, which leaves out tied weights.

    Raises:
        ModelUnsupported: names tensors that are missing, left over, or of other shapes.
    """
    missing = sorted(found["missing_keys"])
    surplus = sorted(name for name in found["unexpected_keys"] if not _BUFFERS.search(name))
    mismatched = [
        f"{name} ({list(given)} instead of {list(wanted)})"
        for name, given, wanted in sorted(found["mismatched_keys"])
    ]
    faults = [
        _listed("its files lack", missing),
        _listed("its files have, and its configuration has not,", surplus),
        _listed("its files have in other shapes", mismatched),
    ]
    reasons = "; ".join(filter(None, faults))
    if reasons:
        raise ModelUnsupported(f"{model}: weights and config.json do not fit together: {reasons}")


@torch.inference_mode()
def refuse_broken(model_name: str, model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights or scales; reads each once.

    Raises:
        ModelUnsupported: names the tensors.
    """
    broken = [name for name, weight in _weights(model) if not _is_finite(weight)]
    if broken:
        listed = _listed("NaN or infinite values in", broken)
        raise ModelUnsupported(f"{model_name}: {listed}; copy or download the model again")


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and what quantized layers have instead, by name."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield from ((f"{name}.{own}", each) for own, each in module.named_buffers())


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether all elements are finite; tests their sum first, which is several times as fast."""
    if not weight.is_floating_point() or bool(weight.sum().isfinite()):
        return True
    return all(bool(part.isfinite().all()) for part in torch.split(weight.flatten(), 2**24))


def _listed(what: str, names: Iterable[str]) -> str:
    """Some of the names and the number of the others; empty if there are none."""
    all_ = list(names)
    if not all_:
        return ""
    more = f" and {len(all_) - _MOST_NAMES} more" if len(all_) > _MOST_NAMES else ""
    return f"{what} {', '.join(all_[:_MOST_NAMES])}{more}"
