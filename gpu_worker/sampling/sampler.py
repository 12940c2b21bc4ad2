"""Choosing the next token of each row.

Greedy, or Gumbel-max: the argmax of filtered logits plus noise is a draw from their softmax. The
noise does not depend on the batch, so neither does the draw.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.batch import BatchState
from gpu_worker.batch.sequence_arrays import Slots
from gpu_worker.sampling import cpu_argmax, torch_sampler
from gpu_worker.sampling.gumbel import row_keys
from gpu_worker.sampling.penalties import PenalizedRows, Penalties
from kernels.cpu.sampling.pruned_argmax import Likeliest
from kernels.cpu.sampling.sampler import Drawing

_BANNED = float("-inf")
_NO_KEYS = np.empty((2, 0), np.int32)
_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the rows of a step; the same object serves while the rows stay."""

    drawn: Slots  # [D] rows with a temperature; the others are greedy
    seeds: npt.NDArray[np.uint64]  # [D]
    choices: npt.NDArray[np.int64]  # [D]
    temperature: npt.NDArray[np.float32]  # [D]
    top_k: npt.NDArray[np.int64]  # [D]
    top_p: npt.NDArray[np.float32]  # [D]
    min_p: npt.NDArray[np.float32]  # [D]
    on_device: "DeviceDraw | None"  # the same where a GPU wants it
    has_minimum: bool  # some row may not end yet
    asking: Slots  # rows whose log-probabilities are wanted
    penalized: PenalizedRows | None = None  # rows whose logits are changed

    @staticmethod
    def of(
        batch: BatchState, slots: Slots, penalties: Penalties, device: torch.device
    ) -> "RowSampling":
        """Parameters of the sequences in ``slots``."""
        temperature = batch.temperature[slots]
        drawn = np.flatnonzero(temperature > 0)
        of_drawn = slots[drawn]
        top_k, top_p, min_p = batch.top_k[of_drawn], batch.top_p[of_drawn], batch.min_p[of_drawn]
        on_device = None
        if device.type != "cpu":
            on_device = DeviceDraw(
                torch.from_numpy(drawn).to(device, non_blocking=True),
                torch.from_numpy(temperature[drawn]).to(device, non_blocking=True),
                torch_sampler.Filters.of(top_k, top_p, min_p, device),
            )
        penalized = np.flatnonzero(batch.penalized[slots])
        return RowSampling(
            drawn=drawn,
            seeds=batch.seed[of_drawn],
            choices=batch.choice[of_drawn],
            temperature=temperature[drawn],
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            on_device=on_device,
            has_minimum=bool(below_minimum(batch, slots).any()),
            asking=np.flatnonzero(batch.wants_logprobs[slots]),
            penalized=penalties.rows(penalized, batch.handle[slots[penalized]]),
        )

    @property
    def only_likeliest(self) -> bool:
        """Whether nothing is asked of logits but where the largest is."""
        changed = self.has_minimum or self.penalized is not None
        return not (changed or len(self.drawn) or len(self.asking))


@dataclass(frozen=True, slots=True)
class DeviceDraw:
    """What ``torch_sampler`` needs."""

    drawn: torch.Tensor  # [D] int64
    temperature: torch.Tensor  # [D] float32
    filters: torch_sampler.Filters | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens chosen, where the logits are.

    Attributes:
        tokens: [R] int64.
        broken: [R] bool, rows whose logits were no numbers; their token is a stopgap.
    """

    tokens: torch.Tensor
    broken: torch.Tensor

    @staticmethod
    def of(found: Likeliest) -> "Chosen":
        """Tokens of a step that wanted the likeliest."""
        tokens = torch.from_numpy(found.tokens.copy())  # its own are the next step's, too
        return Chosen(tokens, torch.from_numpy(~np.isfinite(found.best)))


def keys_of(
    rows: RowSampling,
    positions: npt.NDArray[np.int64],  # [R] of the tokens that are drawn
) -> npt.NDArray[np.int32]:
    """The noise of rows that draw, [2, D]."""
    if not len(rows.drawn):
        return _NO_KEYS
    return row_keys(rows.seeds, rows.choices, positions[rows.drawn])


def choose(
    logits: torch.Tensor,  # [R, V]
    rows: RowSampling,
    keys: npt.NDArray[np.int32],  # [2, D]
    device_keys: torch.Tensor,  # [2, D] int32, the same where the logits are
) -> Chosen:
    """Choose a token for each row; on a GPU without waiting, unless a filter has to."""
    best, tokens = _likeliest(logits)
    if len(rows.drawn):
        _draw(logits, rows, keys, device_keys, tokens)
    if logits.is_cuda:
        # The stopgap is wherever the maximum was: to ask would be to wait.
        return Chosen(tokens, ~best.isfinite())
    # For so few numbers torch's calls cost many times what numpy's do.
    broken = torch.from_numpy(~np.isfinite(best.numpy()))
    if broken.numpy().any():
        tokens[broken] = torch.nan_to_num(logits[broken].float(), _BANNED, _BANNED).argmax(-1)
    return Chosen(tokens, broken)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row [R, V] and where it is first; a NaN anywhere is the maximum."""
    if logits.is_cuda:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    if logits.dtype == torch.bfloat16:
        found, value = cpu_argmax.likeliest(logits.view(torch.uint16).numpy())
        return torch.from_numpy(value), torch.from_numpy(found)
    # numpy's argmax is vectorized, and up to ten times as fast as torch's.
    wide = logits.float()
    tokens = torch.from_numpy(wide.numpy().argmax(1))
    return wide.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


def below_minimum(batch: BatchState, slots: Slots) -> npt.NDArray[np.bool_]:
    """Which of the sequences may not end yet."""
    return batch.num_tokens[slots] < batch.min_length[slots]


def ban_ends(
    logits: torch.Tensor,  # [R, V], changed in place
    batch: BatchState,
    slots: Slots,  # [R]
) -> None:
    """Take the end away from rows that have not generated their minimum."""
    for row in np.flatnonzero(below_minimum(batch, slots)).tolist():
        ends = batch.end_tokens[slots[row]]
        ends = ends[(ends >= 0) & (ends < logits.shape[1])]
        logits[row, torch.from_numpy(ends).to(logits.device, non_blocking=True)] = _BANNED


def _draw(
    logits: torch.Tensor,  # [R, V]
    rows: RowSampling,
    keys: npt.NDArray[np.int32],  # [2, D]
    device_keys: torch.Tensor,  # [2, D] int32
    tokens: torch.Tensor,  # [R], those of the D rows that draw are replaced
) -> None:
    if (device := rows.on_device) is not None:
        all_draw = len(rows.drawn) == len(logits)
        wanted = logits if all_draw else logits[device.drawn]
        found = torch_sampler.draw(wanted, device.temperature, device.filters, device_keys)
        tokens[device.drawn] = found
        return
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    drawing = _drawing()
    drawing.draw(
        logits, rows.drawn, rows.temperature, rows.top_k, rows.top_p, rows.min_p, keys,
        tokens.numpy(),
    )  # fmt: skip


def _drawing() -> Drawing:
    """The calling thread's own: its memory serves one draw at a time."""
    try:
        found: Drawing = _of_thread.drawing
    except AttributeError:
        found = _of_thread.drawing = Drawing()
    return found
