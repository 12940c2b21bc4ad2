"""Replaces the rotary embedding that a model's attention calls by one call of a kernel."""

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import ATTENTION_NAME, DEFERRED_ROTARY, Rotation
from gpu_worker.model.fusion.module_matching import close, random_rows
from shared.errors import ModelUnsupported

_ROTARY = "apply_rotary_pos_emb"
"""The name of the function that the code of transformers' attention layers calls."""

Rotate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Queries [T, H, D], keys [T, Hkv, D], cosines and sines [T, D] to rotated queries and keys.

Some also take cosines and sines [T, Dr], and rotate only the first Dr elements of each head.
"""


class FusedRotary:
    """Rotary embeddings of queries and keys at once, called as transformers calls its own.

    Args:
        own: the function of the model's code, for calls with other arguments.
        rotate: for calls with the usual arguments.
        partial: both can rotate a part of each head, for cosines and sines of that size.
    """

    def __init__(
        self,
        own: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        rotate: Rotate,
        partial: bool = False,
    ) -> None:
        self._own = own
        self._rotate = rotate
        self._partial = partial

    def __call__(
        self,
        query: torch.Tensor,  # [1, H, T, D]
        key: torch.Tensor,  # [1, Hkv, T, D]
        cos: torch.Tensor,  # [1, T, Dr]
        sin: torch.Tensor,  # [1, T, Dr]
        *more: Any,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of the same shapes."""
        whole = not self._partial
        if more or others or not _is_usual(query, key, cos, sin, whole):
            return self._own(query, key, cos, sin, *more, **others)
        query, key = self._rotate(query[0].transpose(0, 1), key[0].transpose(0, 1), cos[0], sin[0])
        return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


class DeferredFusedRotary(FusedRotary):
    """The fused rotary embedding of one attention module, which leaves its work to the attention.

    It returns queries and keys as they are. The attention function rotates them in the launch that
    stores keys and values, or before it.

    Args:
        fused: rotates queries and keys at once.
        module: whose queries and keys they are.

    Attributes:
        was_taken: whether the attention has taken something: it is otherwise rotated at once.
    """

    def __init__(self, fused: FusedRotary, module: nn.Module) -> None:
        super().__init__(fused._own, fused._rotate)
        self._module = module
        self._deferred: tuple[torch.Tensor, torch.Tensor, Rotation] | None = None
        self.was_taken = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = getattr(self._module, "config", None)
        is_ours = getattr(config, "_attn_implementation", None) == ATTENTION_NAME
        if not is_ours or more or others or not _is_usual(query, key, cos, sin, whole=True):
            return super().__call__(query, key, cos, sin, *more, **others)
        self._deferred = query, key, Rotation(cos[0], sin[0])
        return query, key

    def take(self, query: torch.Tensor, key: torch.Tensor) -> Rotation | None:
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return None
        self.was_taken = True
        if query is not deferred[0] or key is not deferred[1]:
            raise ModelUnsupported("the model changes queries or keys after their rotary embedding")
        return deferred[2]

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotate(query, key, rotation.cos, rotation.sin)

    @property
    def is_left(self) -> bool:
        """Whether the attention has not taken what was left to it."""
        return self._deferred is not None


class RotaryReplacer:
    """Makes attention layers call a fused rotary embedding.

    Args:
        rotate: the fused one.
        dtypes: that it serves.
        device: where it runs.
        partial: whether it can rotate a part of each head.
    """

    def __init__(
        self,
        rotate: Rotate,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        partial: bool = False,
    ) -> None:
        self._partial = partial
        self._rotate = rotate
        self._dtypes = dtypes
        self._device = device
        self._fused: dict[type[nn.Module], FusedRotary | None] = {}

    def replace(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Make an attention layer of a dtype call the fused one; whether that was possible.

        Transformers' code is not changed: the layer gets a copy of its ``forward`` with another
        global of that name.
        """
        kind = type(module)
        if kind not in self._fused:
            self._fused[kind] = self._fused_like(module, dtype)
        fused = self._fused[kind]
        if fused is None:
            return False
        _call_rotary(module, fused)
        return True

    def defer(self, modules: Iterable[nn.Module]) -> list[DeferredFusedRotary]:
        """Leave the rotary embeddings of replaced modules to the attention after them."""
        found = []
        for module in modules:
            if (fused := self._fused.get(type(module))) is not None:
                found.append(deferred := DeferredFusedRotary(fused, module))
                _call_rotary(module, deferred)
                setattr(module, DEFERRED_ROTARY, deferred)
        return found

    def defer_no_more(self, modules: Iterable[nn.Module]) -> None:
        """Undo ``defer``."""
        for module in modules:
            if hasattr(module, DEFERRED_ROTARY):
                delattr(module, DEFERRED_ROTARY)
                self.replace(module, next(module.parameters()).dtype)

    def _fused_like(self, module: nn.Module, dtype: torch.dtype) -> FusedRotary | None:
        """A fused rotary embedding for modules of one type; None: there is none."""
        forward: Any = type(module).forward
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        own = getattr(forward, "__globals__", {}).get(_ROTARY)
        head_dim = getattr(module, "head_dim", getattr(module, "head_size", None))
        if _ROTARY not in names or not callable(own) or not isinstance(head_dim, int):
            return None
        if dtype not in self._dtypes:
            return None
        fused = FusedRotary(own, self._rotate)
        if not self._rotates_alike(own, fused, head_dim, head_dim, dtype):
            return None
        if self._partial:
            partial = FusedRotary(own, self._rotate, partial=True)
            if self._rotates_alike(own, partial, head_dim, head_dim // 4 * 2, dtype):
                fused = partial
        return fused

    def _rotates_alike(
        self,
        own: Callable[..., Any],
        fused: FusedRotary,
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
    ) -> bool:
        """Whether both rotate random queries and keys alike; cosines and sines are random, too."""
        num_tokens = 5
        rows = random_rows((num_tokens, 7, head_dim), dtype, self._device).transpose(0, 1)[None]
        query, key = rows[:, :3], rows[:, 3:5]
        cos, sin = rows[:, 5, :, :rotary_dim], rows[:, 6, :, :rotary_dim]
        try:
            expected = own(query, key, cos, sin)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it takes other arguments
            return False
        if not isinstance(expected, tuple) or len(expected) != 2:
            return False
        found = fused(query, key, cos, sin)
        return all(close(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _call_rotary(module: nn.Module, rotary: FusedRotary) -> None:
    """Give a module a copy of its type's ``forward`` that calls this rotary embedding."""
    forward: Any = type(module).forward
    copied = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copied, module)


def _is_usual(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, whole: bool
) -> bool:
    if query.dim() != 4 or key.dim() != 4 or not len(query) == len(key) == 1 or cos.dim() != 3:
        return False
    head_dim, rotary_dim = query.shape[3], cos.shape[2]
    of_tokens = (1, query.shape[2], rotary_dim)
    fits = query.shape[2:] == key.shape[2:] and cos.shape == sin.shape == of_tokens
    fits &= rotary_dim == head_dim if whole else 0 < rotary_dim <= head_dim
    one_type = len({each.dtype for each in (query, key, cos, sin)}) == 1
    lies = all(each.stride(-1) == 1 for each in (query, key, cos, sin))
    return fits and one_type and lies and rotary_dim % 2 == 0
