"""Records a model's decoder layers, and what is around them, where that is possible (CPU)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.attention import STEP_KEYWORD, PagedStep
from gpu_worker.compiled import decoder_layers
from gpu_worker.direct_pass import DirectPass
from gpu_worker.model import RaggedModel
from gpu_worker.position_tables import position_tables
from gpu_worker.recorded_layers import (
    Behind,
    EarlierLayer,
    LayerCall,
    Listener,
    Recorded,
    RecordedLayers,
)
from gpu_worker.recording import Arena, CannotRecord, Recording
from gpu_worker.surgery import places
from gpu_worker.surroundings import NothingAttended, Surroundings, find_surroundings
from kernels.cpu_layers import CpuLayers
from kernels.cpu_tape import JobRecorder, NotedJob, Tape
from kernels.cpu_threads import recording
from kernels.interface import AttentionBackend, LayerCache, RaggedBatch
from shared.logs import EventLog

log = EventLog(__name__)

_PROBE_TOKENS = 2
_MOST_LOGITS_BYTES = 1 << 28


def record_layers(
    model: RaggedModel,
    attention: Sequence[nn.Module],
    kernels: CpuLayers,
    backend: AttentionBackend,
    caches: Mapping[nn.Module, LayerCache],
    num_tokens: int,
    max_model_len: int,
) -> RecordedLayers:
    """Let the model play its layers, in place; past its own code, if that does nothing else.

    Args:
        model: with compiled layers.
        attention: its attention layers.
        kernels: for what is computed between the layers' own calls.
        backend: kernels that run on the CPU.
        caches: what they write to and attend over.
        num_tokens: of the largest step.
        max_model_len: positions that there are.

    Raises:
        CannotRecord: the model is as it was.
    """
    began = time.monotonic()
    owner, name, layers = _layer_list(model, attention)
    told = _who_is_told_what(model, layers)
    around, because = _find_around(model, layers)
    calls: list[LayerCall] = []
    earlier = [EarlierLayer(calls, index) for index in range(max(told))]
    recorder = _Recorder(layers, told, calls, kernels, around)
    setattr(owner, name, nn.ModuleList([*earlier, recorder]))
    step = PagedStep(backend, caches, _widest_batch(num_tokens))
    try:
        _run(model, step, num_tokens)
        if recorder.recorded is None:
            raise CannotRecord("its layers were not called")
    except Exception as error:
        setattr(owner, name, layers)
        raise CannotRecord(_reason(error)) from error
    found = RecordedLayers(layers, told, calls)
    found.recorded = recorder.recorded
    if around is not None:
        setattr(owner, name, nn.ModuleList([*earlier, Listener(calls)]))
        try:
            tables = position_tables(model, recorder.recorded, max_model_len)
            model.short_cut = DirectPass(around.embedding, found, tables, around.head)
        except Exception as error:
            because = _reason(error)
    setattr(owner, name, nn.ModuleList([*earlier, found]))
    log.info(
        "layers recorded",
        jobs=len(found.recorded.tape),
        tokens=num_tokens,
        bytes=found.recorded.tape.nbytes + found.recorded.arena.nbytes,
        seconds=round(time.monotonic() - began, 2),
        **({"called_around": because} if because else {}),
    )
    return found


def _find_around(
    model: RaggedModel, layers: nn.ModuleList
) -> tuple[Surroundings | None, str | None]:
    """What is around the layers, or why that is not known."""
    try:
        return find_surroundings(model, layers), None
    except Exception as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    """What to say of it; a model's own code raises whatever it likes."""
    return str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"


class _Recorder(nn.Module):
    """In the place of the layers for one forward pass: notes their jobs, computes nothing."""

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
        step = others[STEP_KEYWORD]
        arena, jobs = Arena(), JobRecorder()
        given, own = [*self._calls, LayerCall(more, others)], _OwnTensors(arena)
        calls = [LayerCall(own.replace(call.more), own.replace(call.others)) for call in given]
        before = None
        if self._around is not None:
            before = _before(self._around.embedding, self._kernels, arena, hidden)
        first = arena.empty(tuple(hidden.shape), hidden.dtype) if before is None else before.hidden
        out = first
        with recording(jobs), Recording(arena, self._kernels.elements):
            for layer, told in zip(self.layers, self._told, strict=True):
                out = layer(out, *calls[told].more, **calls[told].others)
            num_jobs = len(jobs.jobs)
            behind = None if self._around is None else _behind(self._around, out, jobs)
        if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
            raise CannotRecord("its layers do not hand on hidden states alone")
        layers = jobs.jobs[:num_jobs]
        tape = Tape(layers, hidden.shape[1])
        read = [
            (number, index, tensor)
            for number, call in enumerate(calls)
            for index, tensor in enumerate(call.tensors())
            if number in self._told and _is_read(tensor, layers)
        ]
        for tensor in (first, *(tensor for _, _, tensor in read)):
            if tensor.shape[:2] != hidden.shape[:2]:
                raise CannotRecord(f"its layers read a tensor of shape {tuple(tensor.shape)}")
        self.recorded = Recorded(
            tape,
            step,
            first,
            None if before is None else before.jobs,
            tuple(read),
            out,
            layers,
            behind,
            arena,
        )
        return hidden


@dataclass(frozen=True, slots=True)
class _Before:
    """What the first layer reads [1, N, K], and the jobs that write it."""

    hidden: torch.Tensor
    jobs: Sequence[NotedJob]


def _before(
    embedding: nn.Module, kernels: CpuLayers, arena: Arena, hidden: torch.Tensor
) -> _Before | None:
    """Embeddings of as many tokens, noted; None if they are more than looked up and multiplied."""
    jobs, token_ids = JobRecorder(), torch.zeros(hidden.shape[1], dtype=torch.int64)
    try:
        with recording(jobs), Recording(arena, kernels.elements, token_ids):
            found = embedding(token_ids.unsqueeze(0))
    except Exception as error:
        log.debug("embeddings are not looked up by the tape", because=_reason(error))
        return None
    return _Before(found, jobs.jobs) if found.shape == hidden.shape else None


def _behind(around: Surroundings, out: torch.Tensor, jobs: JobRecorder) -> Behind:
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


def _layer_list(
    model: RaggedModel, attention: Sequence[nn.Module]
) -> tuple[nn.Module, str, nn.ModuleList]:
    """The one list of decoder layers, and where it is."""
    layers = decoder_layers(model.model, attention)
    for owner, name, child in places(model.model):
        if isinstance(child, nn.ModuleList) and list(child) == layers:
            return owner, name, child
    raise CannotRecord("it has no single list of layers")


def _who_is_told_what(model: RaggedModel, layers: nn.ModuleList) -> list[int]:
    """For each layer, the first one that is called with the same arguments.

    Raises:
        CannotRecord: the layers do not follow each other.
    """
    calls: list[LayerCall] = []
    outputs: list[Any] = []

    def called(_: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
        if not args:
            raise CannotRecord("its layers get their hidden states by name")
        if outputs and args[0] is not outputs[-1]:
            raise CannotRecord("something is computed between its layers")
        calls.append(LayerCall(args[1:], others))

    def returned(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        outputs.append(output)

    hooks = [layer.register_forward_pre_hook(called, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(returned) for layer in layers]
    try:
        _run(model, NothingAttended(), _PROBE_TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(layers):
        raise CannotRecord("its layers are not called once each")
    return [next(n for n, each in enumerate(calls) if each.same(call)) for call in calls]


def _run(model: RaggedModel, step: Any, num_tokens: int) -> None:
    """A forward pass whose result nobody wants."""
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    model.forward(token_ids, torch.arange(num_tokens), step, rows=token_ids[:1])


def _widest_batch(num_tokens: int) -> RaggedBatch:
    """Of so many sequences of one token."""
    count = torch.arange(num_tokens + 1, dtype=torch.int32)
    return RaggedBatch(
        slot_mapping=torch.full((num_tokens,), -1),
        block_tables=torch.zeros(num_tokens, 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        query_starts=count,
        max_query_len=1,
        max_context_len=1,
    )


def _is_read(tensor: torch.Tensor, jobs: Sequence[NotedJob]) -> bool:
    """Whether a job knows an address inside."""
    begin = tensor.data_ptr()
    behind = begin + tensor.nbytes
    return any(begin <= word < behind for job in jobs for word in job.words)
