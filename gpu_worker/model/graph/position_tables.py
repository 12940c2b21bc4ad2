"""Tables of what a model tells its layers of positions (CPU)."""

from dataclasses import dataclass

import torch

from gpu_worker.model.graph.captured_layers import LayerCall, Recorded, Told
from gpu_worker.model.graph.model_inputs_outputs import NothingAttended
from gpu_worker.model.graph.torch_capture import CannotRecord
from gpu_worker.model.ragged_model import RaggedModel

_MOST_BYTES = 1 << 27
_NUM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class PositionTable:
    """What layers are told of positions.

    Attributes:
        rows: [L, ...], of each position.
        place: [N, ...], where the tape reads those of a step's tokens.
    """

    rows: torch.Tensor
    place: torch.Tensor


def position_tables(
    model: RaggedModel, recorded: Recorded, max_model_len: int
) -> tuple[PositionTable, ...]:
    """A table of each tensor that the recorded layers read beside hidden states.

    Args:
        model: with a ``Listener`` in the place of its layers.
        recorded: they.
        max_model_len: positions that there are.

    Raises:
        CannotRecord: the tables would be too large, or rows depend on more than their position.
    """
    step_tokens = recorded.tape.num_tokens
    of_position = sum(place.nbytes for *_, place in recorded.read) // step_tokens
    if max_model_len * of_position > _MOST_BYTES:
        raise CannotRecord(f"tables of {max_model_len} positions would be too large")
    tables = [
        PositionTable(torch.empty(max_model_len, *place.shape[2:], dtype=place.dtype), place[0])
        for *_, place in recorded.read
    ]
    for begin in range(0, max_model_len, step_tokens):
        positions = torch.arange(begin, min(begin + step_tokens, max_model_len))
        rows = _told(model, recorded, torch.zeros_like(positions), positions)
        for table, found in zip(tables, rows, strict=True):
            table.rows[positions] = found
    # Other tokens, together and each by itself: some embeddings depend on the longest sequence.
    sample = torch.linspace(0, max_model_len - 1, min(_NUM_SAMPLES, step_tokens)).long()
    for positions in (sample, *sample.unsqueeze(1)):
        rows = _told(model, recorded, torch.ones_like(positions), positions)
        for table, found in zip(tables, rows, strict=True):
            if not torch.equal(table.rows[positions], found):
                raise CannotRecord("its layers are told what depends on more than positions")
    return tuple(tables)


def _told(
    model: RaggedModel, recorded: Recorded, token_ids: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    """What layers are told [T, ...] that the tape reads.

    Raises:
        CannotRecord: it is not of these tokens.
    """
    calls: list[LayerCall] = []
    try:
        model.forward(token_ids, positions, NothingAttended(), rows=None)
    except Told as told:
        calls = told.calls
    found = []
    for call, index, place in recorded.read:
        tensors = calls[call].tensors() if call < len(calls) else []
        if index >= len(tensors) or tensors[index].shape != (1, len(positions), *place.shape[2:]):
            raise CannotRecord("its layers are told something else in other passes")
        found.append(tensors[index][0])
    return found
