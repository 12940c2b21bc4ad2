"""Records a model's decoder layers, and what is around them, where that is possible (CPU)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import PagedStep
from gpu_worker.model.fusion.cpu_layers import PackedLinear
from gpu_worker.model.fusion.module_matching import places
from gpu_worker.model.graph.capture_pass import NotingLayers
from gpu_worker.model.graph.captured_layers import (
    EarlierLayer,
    LayerCall,
    Listener,
    RecordedLayers,
)
from gpu_worker.model.graph.direct_pass import DirectPass
from gpu_worker.model.graph.model_inputs_outputs import (
    NothingAttended,
    Surroundings,
    find_surroundings,
)
from gpu_worker.model.graph.position_tables import position_tables
from gpu_worker.model.graph.torch_capture import CannotRecord
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.model.torch_compiled import decoder_layers
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.sampling.pruned_argmax import PrunedArgmax, find_pruned_argmax
from kernels.interface import AttentionBackend, LayerCache, RaggedBatch
from shared.logs import EventLog

log = EventLog(__name__)

_PROBE_TOKENS = 2


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
    recorder = NotingLayers(layers, told, calls, kernels, around)
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
            pruned = _pruned(model, kernels, around.head, num_tokens)
            model.short_cut = DirectPass(around.embedding, found, tables, around.head, pruned)
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


def _pruned(
    model: RaggedModel, kernels: CpuLayers, head: nn.Module, num_tokens: int
) -> PrunedArgmax | None:
    """The pruned argmax of the output layer, if it allows one."""
    if not isinstance(head, PackedLinear) or model.dtype != torch.bfloat16:
        return None
    began = time.monotonic()
    pruned = find_pruned_argmax(kernels, head.layers, num_tokens)
    if pruned is not None:
        model.packed_bytes += pruned.nbytes
        seconds = round(time.monotonic() - began, 2)
        log.info("output layer quantized", bytes=pruned.nbytes, seconds=seconds)
    return pruned


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
