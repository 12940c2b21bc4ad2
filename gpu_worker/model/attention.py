"""Paged attention inside transformers' models.

A model calls the function that is registered here once per layer. The model's forward passes the
step's block tables and backend to it, as a keyword argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from kernels.interface import (
    AttentionBackend,
    AttentionParams,
    LayerCache,
    RaggedBatch,
    RotatingBackend,
)
from shared.errors import ModelUnsupported

ATTENTION_NAME = "pagestream"
"""Name of the function in transformers, which builds no attention mask for it."""

STEP_KEYWORD = "pagestream_step"
"""Keyword argument of the model's forward that carries an AttentionStep."""

DEFERRED_ROTARY = "pagestream_rotary"
"""Attribute of attention modules that carries a DeferredRotary."""

# Arguments of other models' attention functions that are not supported.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences of its own",
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines by which queries and keys are still to be rotated."""

    cos: torch.Tensor  # [T, D]
    sin: torch.Tensor  # [T, D]


class DeferredRotary(Protocol):
    """The rotary embedding of one module, which leaves its work to the attention after it."""

    def take(self, query: torch.Tensor, key: torch.Tensor) -> Rotation | None:
        """What is still to be done with these queries and keys; None: nothing.

        Raises:
            ModelUnsupported: they are not those that were to be rotated.
        """

    def rotated(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        rotation: Rotation,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [T, H, D] and keys [T, Hkv, D]."""


class AttentionStep(Protocol):
    """Computes the attention of one forward pass."""

    def attend(
        self,
        layer: nn.Module,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention output [T, H, D] of one layer."""


class PagedStep:
    """The attention of a step over a KV memory.

    Args:
        backend: the kernels.
        layers: each attention module's part of the memory.
        batch: slot mapping and block tables of the step.
    """

    __slots__ = ("_backend", "_batch", "_layers")

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Mapping[nn.Module, LayerCache],
        batch: RaggedBatch,
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._batch = batch

    @property
    def batch(self) -> RaggedBatch:
        """Slot mapping and block tables of the step."""
        return self._batch

    def lies_where(self, other: "PagedStep") -> bool:
        """Whether both use the same KV memory and the same kernels."""
        return self._layers is other._layers and self._backend is other._backend

    def attend(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        self._backend.write_kv(key, value, self._layers[layer], self._batch.slot_mapping)
        return self._attend(layer, query, params)

    def attend_rotated(
        self,
        layer: nn.Module,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        params: AttentionParams,
        rotation: Rotation,
    ) -> torch.Tensor | None:
        """``attend`` with queries and keys that are rotated first; None: the backend cannot."""
        if not isinstance(self._backend, RotatingBackend):
            return None
        cache, slots = self._layers[layer], self._batch.slot_mapping
        query = self._backend.rotate_and_write_kv(
            query, key, value, rotation.cos, rotation.sin, cache, slots
        )
        return self._attend(layer, query, params)

    def _attend(
        self, layer: nn.Module, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._backend.attend(query, self._layers[layer], self._batch, params, out)
        return out


def register_attention() -> None:
    """Register paged attention with transformers; may be called several times."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def register_uncompiled_attention() -> None:
    """Register paged attention such that torch.compile calls it and does not trace it."""
    opaque = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, opaque)


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    step: AttentionStep | None = others.get(STEP_KEYWORD)
    if step is None:
        raise ModelUnsupported("the model does not pass keyword arguments on to its attention")
    for name, meaning in _UNSUPPORTED.items():
        if others.get(name) is not None:
            raise ModelUnsupported(f"the model's attention needs {meaning}")
    if attention_mask is not None:
        raise ModelUnsupported("the model builds an attention mask of its own")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise ModelUnsupported("keys and values are of different sizes")
    rotary: DeferredRotary | None = getattr(module, DEFERRED_ROTARY, None)
    rotation = None if rotary is None else rotary.take(query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    params = AttentionParams(scale, sliding_window, softcap)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))  # [T, heads, D]
    out = None
    if rotary is not None and rotation is not None:
        if isinstance(step, PagedStep):
            out = step.attend_rotated(module, query, key, value, params, rotation)
        if out is None:
            query, key = rotary.rotated(query, key, rotation)
    if out is None:
        out = step.attend(module, query, key, value, params)
    return out.unsqueeze(0), None  # [1, T, H, D]
