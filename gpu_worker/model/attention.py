"""Our attention inside transformers' models.

A model calls the function that is registered here once per layer. What the step needs beyond
queries, keys and values travels with the call, as a keyword argument through the model's forward.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from kernels.interface import AttentionBackend, AttentionParams, LayerCache, RaggedBatch
from shared.errors import ModelUnsupported

ATTENTION_NAME = "pagestream"
"""Under this name transformers knows the function; no mask is ever built for it."""

STEP_KEYWORD = "pagestream_step"
"""Keyword argument of the model's forward that carries an AttentionStep."""

# What some models ask of an attention function and ours does not do.
_NOT_DONE = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences of its own",
}


class AttentionStep(Protocol):
    """What happens to one forward pass's queries, keys and values."""

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
    """A step over the KV pool.

    Args:
        backend: the kernels.
        layers: each attention module's part of the pool.
        batch: where the tokens of the step lie.
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
        """Where the tokens lie."""
        return self._batch

    def lies_where(self, other: "PagedStep") -> bool:
        """Whether both are over the same pool, by the same kernels."""
        return self._layers is other._layers and self._backend is other._backend

    def attend(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        cache = self._layers[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._backend.write_kv(key, value, cache, self._batch.slot_mapping)
        self._backend.attend(query, cache, self._batch, params, out)
        return out


def register_attention() -> None:
    """Make our attention known to transformers; once per process is enough, more does no harm."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def register_uncompiled_attention() -> None:
    """The same, for a model that is compiled: our attention is called, never looked into."""
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
    for name, meaning in _NOT_DONE.items():
        if others.get(name) is not None:
            raise ModelUnsupported(f"the model's attention needs {meaning}")
    if attention_mask is not None:
        raise ModelUnsupported("the model builds an attention mask of its own")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise ModelUnsupported("keys and values are of different sizes")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    params = AttentionParams(scale, sliding_window, softcap)
    out = step.attend(
        module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), params
    )
    return out.unsqueeze(0), None  # [1, T, H, D]
