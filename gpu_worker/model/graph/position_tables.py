"""Tables of the arguments of a model's layers that depend on positions alone (CPU)."""

from dataclasses import dataclass

import torch

from gpu_worker.model.graph.captured_layers import CapturedLayers, LayerCall, LayersReached
from gpu_worker.model.graph.model_inputs_outputs import NoAttention
from gpu_worker.model.graph.torch_capture import CannotCapture
from gpu_worker.model.ragged_model import RaggedModel

_MOST_BYTES = 1 << 27
_NUM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class PositionTable:
    """One argument of the layers, such as cosines.

    Attributes:
        rows: [L, ...] of each position.
        target: [N, ...] where the captured ops read those of a step's tokens.
    """

    rows: torch.Tensor
    target: torch.Tensor


def position_tables(
    model: RaggedModel, captured: CapturedLayers, max_model_len: int
) -> tuple[PositionTable, ...]:
    """A table of each tensor that the captured layers read beside hidden states.

    Args:
        model: with a ``StoppingLayer`` in the place of its layers.
        captured: those layers.
        max_model_len: number of positions.

    Raises:
        CannotCapture: the tables would be too large, or rows depend on more than their position.
    """
    step_tokens = captured.graph.num_tokens
    bytes_each = sum(each.tensor.nbytes for each in captured.inputs) // step_tokens
    if max_model_len * bytes_each > _MOST_BYTES:
        raise CannotCapture(f"tables of {max_model_len} positions would be too large")
    tables = []
    for each in captured.inputs:
        rows = torch.empty(max_model_len, *each.tensor.shape[2:], dtype=each.tensor.dtype)
        tables.append(PositionTable(rows, each.tensor[0]))
    for begin in range(0, max_model_len, step_tokens):
        positions = torch.arange(begin, min(begin + step_tokens, max_model_len))
        inputs = _layer_inputs(model, captured, torch.zeros_like(positions), positions)
        for table, found in zip(tables, inputs, strict=True):
            table.rows[positions] = found
    # Other tokens, together and each by itself: some embeddings depend on the longest sequence.
    sample = torch.linspace(0, max_model_len - 1, min(_NUM_SAMPLES, step_tokens)).long()
    for positions in (sample, *sample.unsqueeze(1)):
        inputs = _layer_inputs(model, captured, torch.ones_like(positions), positions)
        for table, found in zip(tables, inputs, strict=True):
            if not torch.equal(table.rows[positions], found):
                raise CannotCapture("arguments of its layers depend on more than positions")
    return tuple(tables)


def _layer_inputs(
    model: RaggedModel, captured: CapturedLayers, token_ids: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    """The inputs [T, ...] of the captured layers in a pass over these tokens.

    Raises:
        CannotCapture: they have no row for each token.
    """
    calls: list[LayerCall] = []
    try:
        model.forward(token_ids, positions, NoAttention(), rows=None)
    except LayersReached as reached:
        calls = reached.calls
    found = []
    for each in captured.inputs:
        tensors = calls[each.call].tensors() if each.call < len(calls) else []
        expected = (1, len(positions), *each.tensor.shape[2:])
        if each.index >= len(tensors) or tensors[each.index].shape != expected:
            raise CannotCapture("arguments of its layers differ between passes")
        found.append(tensors[each.index][0])
    return found
