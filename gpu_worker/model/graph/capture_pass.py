"""A forward pass that computes nothing: every kernel's job is noted (CPU)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import STEP_KEYWORD, PagedStep
from gpu_worker.model.graph.captured_layers import Behind, LayerCall, Recorded
from gpu_worker.model.graph.model_inputs_outputs import Surroundings
from gpu_worker.model.graph.torch_capture import Arena, CannotRecord, Recording
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.captured_graph import JobRecorder, NotedJob, Tape
from kernels.cpu.runtime.thread_team import recording
from shared.logs import EventLog

_MOST_LOGITS_BYTES = 1 << 28

log = EventLog(__name__)


class NotingLayers(nn.Module):
    """In the place of a model's layers for one pass over as many tokens as a step may have.

    Args:
        layers: compiled.
        told: for each of them, which of the calls it gets its arguments from.
        calls: what earlier layers have noted.
        kernels: for what is computed between the layers' own calls.
        around: what the model computes before and behind them, if that is all known.

    Attributes:
        recorded: after the pass.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        told: Sequence[int],
        calls: list[LayerCall],
        kernels: CpuLayers,
        around: Surroundings | None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.recorded: Recorded | None = None
        self._told = told
        self._calls = calls
        self._kernels = kernels
        self._around = around

    def forward(self, hidden: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        """Hidden states [1, N, K], unchanged.

        Raises:
            CannotRecord: the layers compute something that no tape can hold.
        """
        step: PagedStep = others[STEP_KEYWORD]
        arena = Arena()
        own = _OwnTensors(arena)
        given = [*self._calls, LayerCall(more, others)]
        calls = [LayerCall(own.replace(call.more), own.replace(call.others)) for call in given]
        before = self._note_embeddings(arena, hidden)
        first = arena.empty(tuple(hidden.shape), hidden.dtype) if before is None else before.hidden
        jobs, behind = JobRecorder(), None
        with recording(jobs), Recording(arena, self._kernels.elements):
            out = self._call_layers(first, calls)
            layers = list(jobs.jobs)
            if self._around is not None:
                behind = _note_behind(self._around, out, jobs)
        if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
            raise CannotRecord("its layers do not hand on hidden states alone")
        self.recorded = Recorded(
            tape=Tape(layers, hidden.shape[1]),
            step=step,
            hidden=first,
            before=None if before is None else before.jobs,
            read=self._read_by(layers, calls, hidden),
            out=out,
            jobs=layers,
            behind=behind,
            arena=arena,
        )
        return hidden

    def _call_layers(self, hidden: torch.Tensor, calls: Sequence[LayerCall]) -> torch.Tensor:
        for layer, told in zip(self.layers, self._told, strict=True):
            hidden = layer(hidden, *calls[told].more, **calls[told].others)
        return hidden

    def _read_by(
        self, jobs: Sequence[NotedJob], calls: Sequence[LayerCall], hidden: torch.Tensor
    ) -> tuple[tuple[int, int, torch.Tensor], ...]:
        """Of all that layers are told, what jobs read: which call, which of its tensors, and where.

        Raises:
            CannotRecord: it is not of the step's tokens.
        """
        read = tuple(
            (number, index, tensor)
            for number, call in enumerate(calls)
            for index, tensor in enumerate(call.tensors())
            if number in self._told and _is_read(tensor, jobs)
        )
        for *_, tensor in read:
            if tensor.shape[:2] != hidden.shape[:2]:
                raise CannotRecord(f"its layers read a tensor of shape {tuple(tensor.shape)}")
        return read

    def _note_embeddings(self, arena: Arena, hidden: torch.Tensor) -> "_Before | None":
        """Jobs of as many tokens' embeddings; None if more is done than tapes can do."""
        if self._around is None:
            return None
        jobs, token_ids = JobRecorder(), torch.zeros(hidden.shape[1], dtype=torch.int64)
        try:
            with recording(jobs), Recording(arena, self._kernels.elements, token_ids):
                found = self._around.embedding(token_ids.unsqueeze(0))
        except Exception as error:  # a model's own code raises whatever it likes
            log.debug("embeddings are not looked up by the tape", because=error)
            return None
        return _Before(found, jobs.jobs) if found.shape == hidden.shape else None


@dataclass(frozen=True, slots=True)
class _Before:
    """What the first layer reads [1, N, K], and the jobs that write it."""

    hidden: torch.Tensor
    jobs: Sequence[NotedJob]


def _note_behind(around: Surroundings, out: torch.Tensor, jobs: JobRecorder) -> Behind:
    """What follows the layers, noted."""
    begin = len(jobs.jobs)
    normed = around.norm(out)
    normed_at, num_tokens = len(jobs.jobs), out.shape[1]
    # Of steps in which every row is asked for its logits; memory that no step needs is not touched.
    fits = num_tokens * around.vocab_size * out.itemsize <= _MOST_LOGITS_BYTES
    logits = around.head(normed) if fits else None
    return Behind(normed, jobs.jobs[begin:normed_at], logits, jobs.jobs[normed_at:])


class _OwnTensors:
    """Memory of a tape's own for what layers are told."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def replace(self, value: Any) -> Any:
        """The same, with other tensors: one for each."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._own:
                own = self._arena.empty(tuple(value.shape), value.dtype)
                self._own[id(value)] = value, own
            return self._own[id(value)][1]
        if isinstance(value, Mapping):
            return {name: self.replace(each) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self.replace(each) for each in value)
        return value


def _is_read(tensor: torch.Tensor, jobs: Sequence[NotedJob]) -> bool:
    """Whether a job knows an address inside."""
    begin = tensor.data_ptr()
    behind = begin + tensor.nbytes
    return any(begin <= word < behind for job in jobs for word in job.words)
