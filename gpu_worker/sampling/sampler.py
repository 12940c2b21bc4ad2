"""Chooses the next token of each row: the argmax of its logits, or a sample.

Gumbel-max sampling: the argmax of filtered logits plus Gumbel noise is a sample from their softmax.
The noise does not depend on the batch, so neither does the sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.batch import BatchState
from gpu_worker.batch.sequence_arrays import Slots
from gpu_worker.sampling import kernels
from gpu_worker.sampling.device_sampling import DeviceSampling
from gpu_worker.sampling.gumbel import row_keys
from gpu_worker.sampling.penalties import PenalizedRows, Penalties
from kernels.interface import RowArgmax
from shared.sampling import PARAMETERS, Effect

_SAMPLE_PARAMETERS = tuple(
    name for name, parameter in PARAMETERS.items() if parameter.effect is Effect.SAMPLE
)
_BANNED = float("-inf")
_NO_KEYS = np.empty((2, 0), np.int32)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the rows of a step; the same object serves while the rows stay.

    Of its R rows, N have a temperature; the others are greedy.
    """

    random_rows: Slots  # [N] rows with a temperature
    seeds: npt.NDArray[np.uint64]  # [N]
    choices: npt.NDArray[np.int64]  # [N]
    parameters: Mapping[str, npt.NDArray[Any]]  # [N] each, those with ``Effect.SAMPLE``
    on_device: DeviceSampling | None  # the same on a GPU; None: on CPUs, or no row needs it
    has_min_tokens: bool  # some row may not end yet
    logprob_rows: Slots  # rows whose log-probabilities are requested
    penalized: PenalizedRows | None = None  # rows whose logits are changed
    has_grammar: bool = False  # some row follows a grammar

    @staticmethod
    def of(
        batch: BatchState, slots: Slots, penalties: Penalties, device: torch.device
    ) -> "RowSampling":
        """Parameters of the sequences in ``slots``."""
        random_rows = np.flatnonzero(batch.temperature[slots] > 0)
        random_slots = slots[random_rows]
        parameters = {name: getattr(batch, name)[random_slots] for name in _SAMPLE_PARAMETERS}
        on_device = None
        if device.type != "cpu" and len(random_rows):
            on_device = DeviceSampling.of(len(slots), random_rows, parameters, device)
        penalized = np.flatnonzero(batch.penalized[slots])
        return RowSampling(
            random_rows=random_rows,
            seeds=batch.seed[random_slots],
            choices=batch.choice[random_slots],
            parameters=parameters,
            on_device=on_device,
            has_min_tokens=bool(below_min_tokens(batch, slots).any()),
            logprob_rows=np.flatnonzero(batch.wants_logprobs[slots]),
            penalized=penalties.rows(penalized, batch.handle[slots[penalized]]),
            has_grammar=bool(batch.has_grammar[slots].any()),
        )

    @property
    def only_argmax(self) -> bool:
        """Whether the argmax of the model's logits is all that is needed of them."""
        changed = self.has_min_tokens or self.has_grammar or self.penalized is not None
        return not (changed or len(self.random_rows) or len(self.logprob_rows))


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The next tokens of a step, on the device of the logits.

    Attributes:
        tokens: [R] int64.
        broken: [R] bool, rows whose logits are not finite; their token is a stopgap.
    """

    tokens: torch.Tensor
    broken: torch.Tensor

    @staticmethod
    def of(found: RowArgmax) -> "ChosenTokens":
        """Tokens of a step that needed only the argmax."""
        tokens = torch.from_numpy(found.tokens.copy())  # the next step overwrites the original
        return ChosenTokens(tokens, torch.from_numpy(~np.isfinite(found.values)))


def gumbel_keys(
    rows: RowSampling,
    positions: npt.NDArray[np.int64],  # [R] of the tokens that are chosen
) -> npt.NDArray[np.int32]:
    """Keys of the Gumbel noise, [2, N]."""
    if not len(rows.random_rows):
        return _NO_KEYS
    return row_keys(rows.seeds, rows.choices, positions[rows.random_rows])


def choose(
    logits: torch.Tensor,  # [R, V]
    rows: RowSampling,
    keys: npt.NDArray[np.int32],  # [2, N]
    device_keys: torch.Tensor,  # [2, N] int32, the same on the device of the logits
) -> ChosenTokens:
    """Choose a token for each row; on a GPU without waiting."""
    if rows.on_device is not None:
        return ChosenTokens(*rows.on_device.choose(logits, device_keys))
    largest, tokens = _argmax(logits)
    if logits.is_cuda:
        # The stopgap is the argmax, whatever it is: a look at the values would be a wait.
        return ChosenTokens(tokens, ~largest.isfinite())
    if len(rows.random_rows):
        kernels.on_cpu().sample(logits, rows.random_rows, rows.parameters, keys, tokens)
    # For so few numbers torch's calls cost many times what numpy's do.
    broken = torch.from_numpy(~np.isfinite(largest.numpy()))
    if broken.numpy().any():
        tokens[broken] = torch.nan_to_num(logits[broken].float(), _BANNED, _BANNED).argmax(-1)
    return ChosenTokens(tokens, broken)


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row [R, V] and its first token; a NaN counts as the maximum."""
    if logits.is_cuda:
        largest, tokens = logits.max(dim=-1)
        return largest, tokens
    if logits.dtype == torch.bfloat16:
        return kernels.on_cpu().argmax(logits)
    # numpy's argmax is vectorized, and up to ten times as fast as torch's.
    wide = logits.float()
    tokens = torch.from_numpy(wide.numpy().argmax(1))
    return wide.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


def below_min_tokens(batch: BatchState, slots: Slots) -> npt.NDArray[np.bool_]:
    """Which of the sequences may not end yet, [n]."""
    return batch.num_tokens[slots] < batch.min_length[slots]


def ban_ends(
    logits: torch.Tensor,  # [R, V], changed in place
    batch: BatchState,
    slots: Slots,  # [R]
) -> None:
    """Ban the end tokens of rows that have not generated their ``min_tokens``."""
    for row in np.flatnonzero(below_min_tokens(batch, slots)).tolist():
        ends = batch.end_tokens[slots[row]]
        ends = ends[(ends >= 0) & (ends < logits.shape[1])]
        logits[row, torch.from_numpy(ends).to(logits.device, non_blocking=True)] = _BANNED
