"""Measures the deviation of outputs from their references, and whether rounding explains it.

The unit is the model's own rounding error: the distance of its own code, in its own type, from
float32. It is measured channel by channel, because a few channels of a trained model are a
thousand times as large as the others and would hide their errors. A bug makes most of the rows
wrong that are computed alike; rounding makes a few rows worse than others. In a mixture of experts
rounding can do more: a token whose experts are nearly tied may be routed to another expert, and is
then far off, while other tokens are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Limits on the error of the median row of a group, and of any one row, in units of the model's own.
_TYPICAL = 2.0
_FAR = 5.0
_MOST_FAR = 0.25  # share of rows that may exceed `_FAR`, in layers with experts
# Relative errors that always pass, where the model's own error was measured and where it was not,
# in units of the type's rounding; and their minimum.
_FLOOR_MEASURED = 0.25
_FLOOR_UNMEASURED = 1.0
_LEAST_FLOOR = 1e-4
_LEAST_OWN = 0.5  # units; a row that the model computed exactly by chance sets no limit


@dataclass(frozen=True, slots=True)
class Outputs:
    """The rows of one stage of the model, computed in three ways; all [T, K].

    Attributes:
        name: of the stage, for errors.
        found: to be judged.
        own: by the model's own code.
        exact: without rounding; ``own`` itself where that was not computed.
        dtype: of the model.
        may_jump: whether rounding may route rows to other experts.
        is_end: whether the errors of all layers add up in it, so that single rows may differ.
    """

    name: str
    found: torch.Tensor
    own: torch.Tensor
    exact: torch.Tensor
    dtype: torch.dtype
    may_jump: bool = False
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of a stage.

    Attributes:
        name: of the stage.
        ratio: its largest error, in units of what rounding explains.
        limit: the largest ratio that passes.
    """

    name: str
    ratio: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains it; NaN does not pass."""
        return self.ratio <= self.limit

    @property
    def severity(self) -> float:
        """The ratio as a share of its limit; NaN counts as infinite."""
        share = self.ratio / self.limit
        return share if share == share else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.name} deviate {self.ratio:.2g} times as far as rounding explains; "
            f"{self.limit:g} times is tolerated"
        )


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check that passed.

    Attributes:
        worst: the deviation that came closest to its limit.
        error: distance of the logits from those without rounding, relative to their spread.
        own_error: the same for the model's own code, or for plain torch over a KV cache of another
            type than the model's.
        num_tokens: tokens compared.
    """

    worst: Deviation
    error: float
    own_error: float
    num_tokens: int

    def for_log(self) -> dict[str, object]:
        """Fields for the log."""
        return {
            "worst": self.worst.name,
            "ratio": f"{self.worst.ratio:.2g}",
            "tolerated": self.worst.limit,
            "error": f"{self.error:.2g}",
            "own_error": f"{self.own_error:.2g}",
            "tokens": self.num_tokens,
        }


def judge(outputs: Outputs, groups: Sequence[torch.Tensor]) -> Deviation:
    """The worst deviation in the outputs of a stage.

    Args:
        outputs: of the stage.
        groups: indices of rows that one bug would make wrong together.
    """
    unit = _unit(outputs)
    found = _row_errors(outputs.found, outputs.exact, unit)
    own = _row_errors(outputs.own, outputs.exact, unit).clamp_min(_LEAST_OWN)
    typical = float(_largest([found[each].median() / own[each].median() for each in groups]))
    if outputs.is_end:  # single rows may differ by any amount, but not all of them
        worst = [Deviation(outputs.name, typical, _FAR)]
        if not outputs.may_jump:
            together = found.pow(2).mean().sqrt() / own.pow(2).mean().sqrt()
            worst.append(Deviation(outputs.name, float(together), _TYPICAL))
    else:
        ratios = found / own.maximum(own.median())
        # With experts, rows that rounding may have routed elsewhere are left out.
        left_out = int(_MOST_FAR * len(ratios)) if outputs.may_jump else 0
        far = float(ratios.sort().values[-1 - left_out])
        worst = [Deviation(outputs.name, typical, _TYPICAL), Deviation(outputs.name, far, _FAR)]
    if not found.isfinite().all():
        worst.append(Deviation(outputs.name, float("inf"), _FAR))
    return max(worst, key=lambda each: each.severity)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference of rows [T, K], each relative to its own spread."""
    finite = expected.isfinite()
    spread = torch.where(finite, expected.float(), 0.0).var(1).clamp_min(1e-18)
    return float((_squares(found, expected).mean(1) / spread).mean().sqrt())


def may_jump(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether rounding may route a token of a layer to other experts."""
    if dtype == torch.float32:
        return False
    kinds = {f"{name} {type(each).__name__}".lower() for name, each in layer.named_modules()}
    return any(word in kind for kind in kinds for word in ("expert", "moe"))


def _largest(ratios: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest; NaN if one is."""
    return torch.stack(list(ratios)).max()


def _unit(outputs: Outputs) -> torch.Tensor:
    """The squared error of each element [T, K] that rounding explains."""
    eps = torch.finfo(outputs.dtype).eps
    measured = outputs.own is not outputs.exact
    share = _FLOOR_MEASURED if measured else _FLOOR_UNMEASURED
    floor = max(share * eps, _LEAST_FLOOR)
    exact = torch.where(outputs.exact.isfinite(), outputs.exact.float(), 0.0)
    own = _squares(outputs.own, outputs.exact).mean(0)  # [K]
    # A channel that is nearly zero is a sum of terms as large as those of other channels.
    size = exact.pow(2).mean(0)  # [K]
    size = size.maximum(size.median())
    unit = own + (eps * exact).pow(2) / 12 + floor**2 * size
    if not measured:  # some tokens are much larger than others, and so are their rounding errors
        unit += floor**2 * exact.pow(2).mean(1, keepdim=True)
    return unit.clamp_min(1e-30)


def _row_errors(found: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Root mean square errors [T], relative to squared units [T, K]."""
    return (_squares(found, exact) / unit).mean(1).sqrt()


def _squares(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Squared differences [T, K] float32; infinite where exactly one side is not finite."""
    ours, theirs = found.float(), expected.float()
    # Some models mask unused vocabulary with -inf: such entries must agree, and count as zero.
    difference = torch.where(ours == theirs, 0.0, ours - theirs)
    return torch.nan_to_num(difference, nan=torch.inf).pow(2)
