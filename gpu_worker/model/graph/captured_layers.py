"""A model's decoder layers, recorded once and played as one call (CPU)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import STEP_KEYWORD, PagedStep
from gpu_worker.model.graph.torch_capture import Arena
from kernels.cpu.runtime.captured_graph import NotedJob, Tape


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer is called with, beside hidden states."""

    more: tuple[Any, ...]
    others: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in a fixed order."""
        found: list[torch.Tensor] = []
        _gather(self.more, found)
        _gather(self.others, found)
        return found

    def same(self, other: "LayerCall") -> bool:
        """Whether the other layer is told the very same."""
        return (
            len(self.more) == len(other.more)
            and self.others.keys() == other.others.keys()
            and all(a is b for a, b in zip(self.more, other.more, strict=True))
            and all(value is other.others[name] for name, value in self.others.items())
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape, and where it reads and writes; of all tensors [1, N, ...] a step uses the first T.

    Attributes:
        tape: the layers' jobs.
        step: the step it was recorded for: it knows the caches and kernels.
        hidden: what the first layer reads.
        before: jobs that write it, by token ids; None: it has to be copied there.
        read: other arguments that jobs read: which call, which of its tensors, and where it goes.
        out: what the last layer writes.
        jobs: of the layers, as they were noted.
        behind: what follows them.
        arena: the memory of all that, and of what lies between.
    """

    tape: Tape
    step: PagedStep
    hidden: torch.Tensor
    before: Sequence[NotedJob] | None
    read: tuple[tuple[int, int, torch.Tensor], ...]
    out: torch.Tensor
    jobs: Sequence[NotedJob]
    behind: "Behind | None"
    arena: Arena

    def serves(self, num_tokens: int, step: PagedStep) -> bool:
        """Whether the step is over the same memory, and not too large."""
        return step.lies_where(self.step) and num_tokens <= self.tape.num_tokens

    def play(
        self, hidden: torch.Tensor, calls: Sequence[LayerCall], step: PagedStep
    ) -> torch.Tensor:
        """Hidden states [1, T, K] behind the last layer, until the next call."""
        num_tokens = hidden.shape[1]
        self.hidden[:, :num_tokens].copy_(hidden)
        given = [call.tensors() for call in calls] if self.read else ()
        for call, index, place in self.read:
            place[:, :num_tokens].copy_(given[call][index])
        self.tape.play(num_tokens, step.batch)
        return self.out[:, :num_tokens]


@dataclass(frozen=True, slots=True)
class Behind:
    """What follows the layers.

    Attributes:
        normed: [1, N, K] what the last normalization writes.
        norm_jobs: that do.
        logits: [1, N, V] of all rows; None: that would be too large.
        head_jobs: that write them.
    """

    normed: torch.Tensor
    norm_jobs: Sequence[NotedJob]
    logits: torch.Tensor | None
    head_jobs: Sequence[NotedJob]


class EarlierLayer(nn.Module):
    """In the place of a layer: notes what it is told, and hands hidden states on as they are.

    Args:
        calls: of this pass so far, shared with those that follow.
        index: of this call.
    """

    def __init__(self, calls: list[LayerCall], index: int) -> None:
        super().__init__()
        self._calls = calls
        self._index = index

    def forward(self, hidden: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        """Hidden states [1, T, K], unchanged."""
        del self._calls[self._index :]  # a pass may have ended before its last layer
        self._calls.append(LayerCall(more, others))
        return hidden


class Told(Exception):
    """Ends a pass in which nobody wants more than what layers are told.

    Attributes:
        calls: what.
    """

    def __init__(self, calls: list[LayerCall]) -> None:
        super().__init__()
        self.calls = calls


class Listener(nn.Module):
    """In the place of the layers behind earlier ones: raises Told."""

    def __init__(self, calls: list[LayerCall]) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, hidden: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:  # noqa: ARG002
        """Hand nothing on.

        Raises:
            Told: always.
        """
        raise Told([*self._calls, LayerCall(more, others)])


class RecordedLayers(nn.Module):
    """A model's decoder layers, behind as many ``EarlierLayer`` as there are calls to know.

    Args:
        layers: the model's own, one after the other.
        told: for each of them, which of the calls it gets its arguments from.
        calls: what the earlier layers have noted.

    Attributes:
        recorded: plays them; what it does not serve is computed layer by layer.
    """

    def __init__(self, layers: nn.ModuleList, told: Sequence[int], calls: list[LayerCall]) -> None:
        super().__init__()
        self.layers = layers
        self.recorded: Recorded | None = None
        self._told = told
        self._calls = calls

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Meanwhile nothing is played."""
        recorded, self.recorded = self.recorded, None
        try:
            yield
        finally:
            self.recorded = recorded

    def forward(self, hidden: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        """Hidden states [1, T, K] behind the last layer."""
        calls = [*self._calls, LayerCall(more, others)]
        self._calls.clear()
        step: Any = others.get(STEP_KEYWORD)
        recorded = self.recorded if isinstance(step, PagedStep) else None
        if recorded is not None and len(hidden) == 1 and recorded.serves(hidden.shape[1], step):
            return recorded.play(hidden, calls, step)
        for layer, told in zip(self.layers, self._told, strict=True):
            hidden = layer(hidden, *calls[told].more, **calls[told].others)
        return hidden


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            _gather(each, found)
    elif isinstance(value, tuple | list):
        for each in value:
            _gather(each, found)
