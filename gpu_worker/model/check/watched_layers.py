"""Routes the calls of a model's decoder layers through a function, for the check at load."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from shared.errors import ModelUnsupported

_HIDDEN = "hidden_states"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a decoder layer.

    Attributes:
        index: of the layer.
        hidden: its input hidden states [1, T, K].
    """

    index: int
    hidden: torch.Tensor
    _watched: "_Watched"
    _more: tuple[Any, ...]
    _others: Mapping[str, Any]
    _by_name: bool

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output [1, T, K] for other hidden states."""
        arguments, others = self._arguments(hidden, self._more, self._others)
        return self._watched.hidden_of(self._watched.layer(*arguments, **others))

    def run_with(
        self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The layer's output with other weights, and with all other arguments cast to ``dtype``."""
        more, others = _cast(self._more, dtype), _cast(dict(self._others), dtype)
        arguments, others = self._arguments(hidden, more, others)
        layer = self._watched.layer
        return self._watched.hidden_of(functional_call(layer, dict(weights), arguments, others))

    def run_on(
        self, layer: nn.Module, hidden: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The output of another layer, with all other arguments cast to ``dtype``; None: as is."""
        more, others = self._more, dict(self._others)
        if dtype is not None:
            more, others = _cast(more, dtype), _cast(others, dtype)
        arguments, others = self._arguments(hidden, more, others)
        return self._watched.hidden_of(layer(*arguments, **others))

    def weights_in(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The layer's parameters in another type, for ``run_with``."""
        return {name: each.to(dtype) for name, each in self._watched.layer.named_parameters()}

    def _arguments(
        self, hidden: torch.Tensor, more: Any, others: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._by_name:
            return tuple(more), {_HIDDEN: hidden, **others}
        return (hidden, *more), dict(others)


Visit = Callable[[LayerCall], torch.Tensor]
"""Gets the call of a layer, and returns the hidden states [1, T, K] to go on with."""


class WatchedLayers:
    """The decoder layers of a model, in their order.

    Args:
        model: of transformers.
        attention: its attention layers.

    Raises:
        ModelUnsupported: it has no list of layers.
    """

    def __init__(self, model: nn.Module, attention: Sequence[nn.Module]) -> None:
        wanted = set(attention)
        self._places: list[tuple[nn.ModuleList, int]] = []
        inside: set[nn.Module] = set()
        for parent in model.modules():
            if not isinstance(parent, nn.ModuleList) or parent in inside:
                continue
            for index, member in enumerate(parent):
                if wanted.intersection(member.modules()):
                    self._places.append((parent, index))
                    inside.update(member.modules())
        if not self._places:
            raise ModelUnsupported("it has no list of decoder layers")
        self._watched = [_Watched(parent[at], n) for n, (parent, at) in enumerate(self._places)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def layers(self) -> list[nn.Module]:
        """The model's own modules."""
        return [parent[at] for parent, at in self._places]

    @contextmanager
    def visited(self, visit: Visit) -> Iterator[None]:
        """Call ``visit`` in the place of each layer inside the block."""
        for (parent, at), watched in zip(self._places, self._watched, strict=True):
            watched.visit, watched.layer = visit, parent[at]
            parent[at] = watched
        try:
            yield
        finally:
            for (parent, at), watched in zip(self._places, self._watched, strict=True):
                parent[at] = watched.layer


class _Watched(nn.Module):
    """Stands in for a layer, with its attributes."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.visit: Visit | None = None
        self._index = index
        self._rest: tuple[Any, ...] | None = None  # further outputs of the layer

    def hidden_of(self, output: Any) -> torch.Tensor:
        """The hidden states in what the layer returned."""
        self._rest = tuple(output[1:]) if isinstance(output, tuple) else None
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    def forward(self, *args: Any, **others: Any) -> Any:
        assert self.visit is not None
        hidden = args[0] if args else others.pop(_HIDDEN)
        out = self.visit(LayerCall(self._index, hidden, self, args[1:], others, not args))
        return out if self._rest is None else (out, *self._rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy in which all floating-point tensors are cast to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(each, dtype) for each in value)
    return value
