"""Ranks the continuations of beam groups as transformers' beam search does."""

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import BeamRows
from gpu_worker.batch.sequence_arrays import SlotArrays, Slots
from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates

_BANNED = float("-inf")
_TILE = 64

_Top = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def beam_candidates(
    logits: torch.Tensor,  # [B, V] of all beams, group by group
    groups: Sequence[BeamRows],
    batch: SlotArrays,
    allowed: torch.Tensor | None = None,  # [B, V] bool, what may follow each beam; None: all
) -> tuple[tuple[BeamCandidates, ...], Slots]:
    """Candidates of each group, best first, and slots of beams whose logits are not finite.

    Such a beam continues with a stopgap: tokens with finite logits, or any if there are none.
    """
    sizes = [len(group.slots) for group in groups]
    parts = torch.split(logits, sizes)
    masks = repeat(None, len(groups)) if allowed is None else torch.split(allowed, sizes)
    ends = [batch.ends_of(int(group.slots[0])) for group in groups]
    found, broken = [], [np.empty(0, np.int64)]
    of_groups = list(zip(parts, groups, ends, masks, strict=True))
    tops = _on_host([_top(*of, batch) for of in of_groups])
    for (part, group, group_ends, mask), top in zip(of_groups, tops, strict=True):
        if np.isnan(top[0][0]):  # one NaN makes its row NaN, and ranks above all numbers
            broken.append(group.slots[(~part.amax(1).isfinite()).cpu().numpy()])
            (top,) = _on_host([_top(_numbers(part), group, group_ends, mask, batch)])
        found.append(_candidates(top, group, group_ends, batch, part.shape[1]))
    return tuple(found), np.concatenate(broken)


def _top(
    logits: torch.Tensor,  # [w, V]
    group: BeamRows,
    ends: Slots,  # [num_ends] tokens
    allowed: torch.Tensor | None,  # [w, V] bool
    batch: SlotArrays,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [k] of the best continuations, and their indices [k] in [w * V]."""
    device = logits.device
    totals = logits.float().log_softmax(dim=-1)
    if allowed is not None:
        totals.masked_fill_(~allowed, _BANNED)
    short = np.flatnonzero(batch.num_tokens[group.slots] < batch.min_length[group.slots])
    if len(short) and len(ends):
        banned = np.ix_(short, ends)
        totals[tuple(torch.from_numpy(index).to(device) for index in banned)] = _BANNED
    totals += torch.from_numpy(group.step.scores.astype(np.float32)).to(device).unsqueeze(1)
    num_wanted = max(2, 1 + len(ends)) * int(batch.beam_width[group.slots[0]])
    return _largest(totals.flatten(), min(num_wanted, totals.numel()))


def _largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of values [n] and their indices, both [k].

    They lie in the k tiles with the largest maxima. A top-k of the maxima is several times faster
    than one of all values.
    """
    tiles = values[: len(values) // _TILE * _TILE].view(-1, _TILE)
    best = tiles.amax(1).topk(min(k, len(tiles))).indices
    within = torch.arange(_TILE, device=values.device)
    rest = torch.arange(tiles.numel(), len(values), device=values.device)
    places = torch.cat([(best.unsqueeze(1) * _TILE + within).flatten(), rest])
    top = values[places].topk(k)
    return top.values, places[top.indices]


def _on_host(tops: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[_Top]:
    """Copy all to host memory by one transfer, since each waits for the device."""
    borders = np.cumsum([len(scores) for scores, _ in tops])[:-1]
    scores = torch.cat([scores for scores, _ in tops]).cpu().numpy()
    places = torch.cat([places for _, places in tops]).cpu().numpy()
    return list(zip(np.split(scores, borders), np.split(places, borders), strict=True))


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """Logits with the lowest finite number in place of NaNs and infinities."""
    least = torch.finfo(torch.float32).min
    return torch.nan_to_num(logits.float(), least, least, least)


def _candidates(
    top: _Top, group: BeamRows, ends: Slots, batch: SlotArrays, vocab_size: int
) -> BeamCandidates:
    scores, places = top
    possible = np.isfinite(scores)
    parents, tokens = np.divmod(places[possible], vocab_size)
    slots = group.slots[parents]
    flags = np.zeros(len(tokens), np.int32)
    flags[batch.num_tokens[slots] + 1 >= batch.max_length[slots]] = EndFlag.LENGTH
    flags[np.isin(tokens, ends)] = EndFlag.STOP
    return BeamCandidates(
        group=group.step.group,
        parents=parents.astype(np.int32),
        tokens=tokens.astype(np.int32),
        scores=scores[possible],
        flags=flags,
    )
