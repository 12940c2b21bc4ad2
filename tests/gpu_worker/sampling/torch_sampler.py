"""Samples tokens with torch's operators: the reference of the kernels on CPUs and GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_TOKEN_STEP = 0x9E3779B1 - 2**32  # odd, spreads neighbouring token ids; as a signed number
# The multipliers of murmur3's finalizer, as signed 32-bit numbers.
_MIX_1 = 0x85EBCA6B - 2**32
_MIX_2 = 0xC2B2AE35 - 2**32
# Most nuclei end among this many tokens; others are found by sorting the whole row.
_NUCLEUS_GUESS = 512
_REJECTED = float("-inf")


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of N rows that keep unlikely tokens from being sampled."""

    top_k: torch.Tensor  # [N] int64, 0 keeps all
    top_p: torch.Tensor  # [N] float32, 1 keeps all
    log_min_p: torch.Tensor  # [N] float32, -inf keeps all
    ranked: torch.Tensor  # [F] rows with a top_k or a top_p
    max_top_k: int
    all_have_top_k: bool  # of the ranked rows

    @staticmethod
    def of(
        parameters: Mapping[str, npt.NDArray[Any]],  # [N] each, by name
        device: torch.device,
    ) -> "Filters | None":
        """The filters; None: no row has one."""
        top_k, top_p, min_p = (parameters[name] for name in ("top_k", "top_p", "min_p"))
        ranked = (top_k > 0) | (top_p < 1)
        if not ranked.any() and not (min_p > 0).any():
            return None
        return Filters(
            top_k=torch.from_numpy(top_k).to(device, non_blocking=True),
            top_p=torch.from_numpy(top_p).to(device, non_blocking=True),
            log_min_p=torch.from_numpy(min_p).to(device, non_blocking=True).log(),
            ranked=torch.from_numpy(np.flatnonzero(ranked)).to(device, non_blocking=True),
            max_top_k=int(top_k.max()),
            all_have_top_k=bool((top_k[ranked] > 0).all()),
        )


def sample(
    logits: torch.Tensor,  # [N, V]
    temperature: torch.Tensor,  # [N] float32
    filters: Filters | None,
    keys: torch.Tensor,  # [2, N] int32
) -> torch.Tensor:
    """A token for each row, [N] int64."""
    scaled = logits.float() / temperature.unsqueeze(1)
    if filters is not None:
        _filter(scaled, filters)
    scaled += gumbel(keys, scaled.shape[1])
    return scaled.argmax(dim=-1)


def _filter(scaled: torch.Tensor, filters: Filters) -> None:
    """Set the logits of rejected tokens to -inf, in place; scaled is [N, V] float32.

    Rows are cut at a value, not at a rank: equal logits are kept or rejected together, so the
    outcome does not depend on how a sort orders them.
    """
    threshold = scaled.amax(dim=-1) + filters.log_min_p  # [N]
    ranked = filters.ranked
    if len(ranked):
        lowest = _ranked_thresholds(
            scaled[ranked], filters.top_k[ranked], filters.top_p[ranked], filters
        )
        threshold[ranked] = torch.maximum(threshold[ranked], lowest)
    scaled.masked_fill_(scaled < threshold.unsqueeze(1), _REJECTED)


def _ranked_thresholds(
    scaled: torch.Tensor,  # [F, V]
    top_k: torch.Tensor,  # [F]
    top_p: torch.Tensor,  # [F]
    filters: Filters,
) -> torch.Tensor:
    """Lowest value [F] that top-k and then top-p keep.

    Where a row has only a top_p, the host waits for the device: the guess may be too small.
    """
    vocab_size = scaled.shape[1]
    width = min(vocab_size, max(_NUCLEUS_GUESS, filters.max_top_k))
    thresholds, complete = _thresholds_within(scaled, top_k, top_p, width)
    if width < vocab_size and not (filters.all_have_top_k or bool(complete.all())):
        wide = (~complete).nonzero().squeeze(1)
        thresholds[wide], _ = _thresholds_within(scaled[wide], top_k[wide], top_p[wide], vocab_size)
    return thresholds


def _thresholds_within(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds [F] among the ``width`` largest values, and whether each is final [F]."""
    values = scaled.topk(width, dim=-1).values  # [F, width], descending
    ranks = torch.arange(width, device=scaled.device)
    limited = top_k > 0
    within_k = (ranks < top_k.unsqueeze(1)) | ~limited.unsqueeze(1)  # [F, width]
    candidates = values.masked_fill(~within_k, _REJECTED)
    total = torch.where(limited, candidates.logsumexp(dim=-1), scaled.logsumexp(dim=-1))
    probability = (candidates - total.unsqueeze(1)).exp()
    before = probability.cumsum(dim=-1) - probability  # mass of the tokens ranked higher
    # A top_p of 1 cuts nothing, although a sum of rounded terms may exceed it.
    inside = (before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    kept = (within_k & inside).sum(dim=-1).clamp_min(1)
    thresholds = values.gather(1, (kept - 1).unsqueeze(1)).squeeze(1)
    return thresholds, limited | (kept < width)


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [R, vocab_size] float32 for keys [2, R] int32."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * _TOKEN_STEP
    bits = _mix(ids.unsqueeze(0) ^ keys[0].unsqueeze(1))  # [R, V]
    bits = _mix(bits.bitwise_xor_(keys[1].unsqueeze(1)))
    # Shift to [0, 2**32), and by half a unit more: zero has no logarithm. Small values, which
    # become large noise, stay exact in float32.
    uniform = bits.to(torch.float32).add_(2.0**31 + 0.5).mul_(2.0**-32)
    exponential = uniform.clamp_(2.0**-33, 1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's finalizer on int32, in place; multiplication wraps on all devices."""
    x ^= _shift_right(x, 16)
    x *= _MIX_1
    x ^= _shift_right(x, 13)
    x *= _MIX_2
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: an int32 is shifted with copies of its sign, which are masked away."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
