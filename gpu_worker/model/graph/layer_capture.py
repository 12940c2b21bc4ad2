"""Captures a model's decoder layers, and what is before and behind them, where possible (CPU)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import PagedStep
from gpu_worker.model.fusion.cpu_layers import PackedLinear
from gpu_worker.model.fusion.module_matching import places
from gpu_worker.model.graph.capture_pass import CapturingLayers
from gpu_worker.model.graph.captured_layers import (
    LayerCall,
    PassThroughLayer,
    ReplayedLayers,
    StoppingLayer,
)
from gpu_worker.model.graph.direct_pass import DirectPass
from gpu_worker.model.graph.model_inputs_outputs import (
    InputOutputLayers,
    NoAttention,
    find_input_output_layers,
)
from gpu_worker.model.graph.position_tables import position_tables
from gpu_worker.model.graph.torch_capture import CannotCapture
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.model.torch_compiled import decoder_layers
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.sampling.pruned_argmax import PrunedArgmax, find_pruned_argmax
from kernels.interface import AttentionBackend, LayerCache, RaggedBatch
from shared.logs import EventLog

log = EventLog(__name__)

_PROBE_TOKENS = 2


def capture_layers(
    model: RaggedModel,
    attention: Sequence[nn.Module],
    kernels: CpuLayers,
    backend: AttentionBackend,
    caches: Mapping[nn.Module, LayerCache],
    num_tokens: int,
    max_model_len: int,
) -> ReplayedLayers:
    """Make the model replay its layers, in place; without its own code where that is possible.

    Args:
        model: whose layers call CPU kernels.
        attention: its attention layers.
        kernels: compute what is between the layers' own calls.
        backend: of the CPU.
        caches: of the attention layers.
        num_tokens: of the largest step.
        max_model_len: number of positions.

    Raises:
        CannotCapture: the model is unchanged.
    """
    began = time.monotonic()
    owner, name, layers = _layer_list(model, attention)
    call_of_layer = _find_calls(model, layers)
    ends, because = _find_ends(model, layers)
    calls: list[LayerCall] = []
    earlier = [PassThroughLayer(calls, index) for index in range(max(call_of_layer))]
    capturing_layers = CapturingLayers(layers, call_of_layer, calls, kernels, ends)
    setattr(owner, name, nn.ModuleList([*earlier, capturing_layers]))
    step = PagedStep(backend, caches, _widest_batch(num_tokens))
    try:
        _run(model, step, num_tokens)
        if capturing_layers.captured is None:
            raise CannotCapture("its layers were not called")
    except Exception as error:
        setattr(owner, name, layers)
        raise CannotCapture(_reason(error)) from error
    found = ReplayedLayers(layers, call_of_layer, calls)
    found.captured = capturing_layers.captured
    if ends is not None:
        setattr(owner, name, nn.ModuleList([*earlier, StoppingLayer(calls)]))
        try:
            tables = position_tables(model, found.captured, max_model_len)
            pruned = _pruned(model, kernels, ends.head, num_tokens)
            model.direct_pass = DirectPass(ends.embedding, found, tables, ends.head, pruned)
        except Exception as error:
            because = _reason(error)
    setattr(owner, name, nn.ModuleList([*earlier, found]))
    log.info(
        "layers captured",
        ops=len(found.captured.graph),
        tokens=num_tokens,
        bytes=found.captured.graph.nbytes + found.captured.arena.nbytes,
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
    if head.out_dtype != torch.float32:  # rounded outputs may have another argmax
        return None
    began = time.monotonic()
    pruned = find_pruned_argmax(kernels, head.layers, num_tokens)
    if pruned is not None:
        model.packed_bytes += pruned.nbytes
        seconds = round(time.monotonic() - began, 2)
        log.info("output layer quantized", bytes=pruned.nbytes, seconds=seconds)
    return pruned


def _find_ends(
    model: RaggedModel, layers: nn.ModuleList
) -> tuple[InputOutputLayers | None, str | None]:
    """The modules before and behind the layers, or why they cannot be captured."""
    try:
        return find_input_output_layers(model, layers), None
    except Exception as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    """The reason for the log; a model's own code raises whatever it likes."""
    return str(error) if isinstance(error, CannotCapture) else f"{type(error).__name__}: {error}"


def _layer_list(
    model: RaggedModel, attention: Sequence[nn.Module]
) -> tuple[nn.Module, str, nn.ModuleList]:
    """The one list of decoder layers, with its owner and its name there."""
    layers = decoder_layers(model.model, attention)
    for owner, name, child in places(model.model):
        if isinstance(child, nn.ModuleList) and list(child) == layers:
            return owner, name, child
    raise CannotCapture("it has no single list of layers")


def _find_calls(model: RaggedModel, layers: nn.ModuleList) -> list[int]:
    """For each layer, the index of the first layer that is called with the same arguments.

    Raises:
        CannotCapture: the layers do not follow each other.
    """
    calls: list[LayerCall] = []
    outputs: list[Any] = []

    def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            raise CannotCapture("its layers get their hidden states by name")
        if outputs and args[0] is not outputs[-1]:
            raise CannotCapture("something is computed between its layers")
        calls.append(LayerCall(args[1:], kwargs))

    def returned(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        outputs.append(output)

    hooks = [layer.register_forward_pre_hook(called, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(returned) for layer in layers]
    try:
        _run(model, NoAttention(), _PROBE_TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(layers):
        raise CannotCapture("its layers are not called once each")
    return [next(n for n, each in enumerate(calls) if each.same(call)) for call in calls]


def _run(model: RaggedModel, step: Any, num_tokens: int) -> None:
    """A forward pass whose result is not used."""
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    model.forward(token_ids, torch.arange(num_tokens), step, rows=token_ids[:1])


def _widest_batch(num_tokens: int) -> RaggedBatch:
    """A batch of so many sequences of one token each."""
    count = torch.arange(num_tokens + 1, dtype=torch.int32)
    return RaggedBatch(
        slot_mapping=torch.full((num_tokens,), -1),
        block_tables=torch.zeros(num_tokens, 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        query_starts=count,
        max_query_len=1,
        max_context_len=1,
    )
