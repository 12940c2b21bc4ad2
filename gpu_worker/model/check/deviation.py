"""How far outputs are from those they should be, and whether rounding explains it.

The measure is the model's own rounding: the distance of its own code, in its own type, from
float32. Errors count in units of that, channel by channel, since few channels of a trained model
are a thousand times as large as the others and would hide those. A mistake makes most of
the rows wrong that are computed alike; rounding makes a few rows worse than others. In a mixture of
experts it may do more: a token whose experts are nearly tied goes to another one when anything is
rounded otherwise, and is far off then, while other tokens are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# The median row of a group, and any one row, may be that many times as far off as the model's own.
_TYPICAL = 2.0
_FAR = 5.0
_MOST_FAR = 0.25  # of all rows, in layers with experts
# Relative errors that matter in no case, where the model's own were measured and where they were
# not: in units of the type's rounding, and at least so much.
_FLOOR_MEASURED = 0.25
_FLOOR_UNMEASURED = 1.0
_LEAST_FLOOR = 1e-4
_LEAST_OWN = 0.5  # units; a row that happened to be exact is no measure


@dataclass(frozen=True, slots=True)
class Outputs:
    """The rows of a stage of the model, computed in three ways; all [T, K].

    Attributes:
        name: of the stage, for errors.
        found: to be judged.
        own: by the model's own code.
        exact: without rounding; ``own`` itself where that was not computed.
        dtype: of the model.
        may_jump: whether rounding may send rows elsewhere.
        is_end: whether errors of all layers have come together, so that single rows differ.
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
    """How far a stage is off.

    Attributes:
        name: of the stage.
        ratio: its largest error, in what rounding explains.
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
        """Share of what is tolerated that was taken; NaN counts as infinite."""
        share = self.ratio / self.limit
        return share if share == share else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.name} deviate {self.ratio:.2g} times as far as rounding explains; "
            f"{self.limit:g} times is tolerated"
        )


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        worst: the stage that took most of what is tolerated.
        error: distance of the logits from those without rounding, relative to their spread.
        own_error: the same of the model's own code.
        num_tokens: tokens compared.
    """

    worst: Deviation
    error: float
    own_error: float
    num_tokens: int

    def for_log(self) -> dict[str, object]:
        """What a start logs of it."""
        return {
            "worst": self.worst.name,
            "ratio": f"{self.worst.ratio:.2g}",
            "tolerated": self.worst.limit,
            "error": f"{self.error:.2g}",
            "own_error": f"{self.own_error:.2g}",
            "tokens": self.num_tokens,
        }


def judge(outputs: Outputs, groups: Sequence[torch.Tensor]) -> Deviation:
    """The worst that there is in the outputs of a stage.

    Args:
        outputs: of the stage.
        groups: indices of rows that one mistake would make wrong together.
    """
    unit = _unit(outputs)
    found = _row_errors(outputs.found, outputs.exact, unit)
    own = _row_errors(outputs.own, outputs.exact, unit).clamp_min(_LEAST_OWN)
    typical = float(_largest([found[each].median() / own[each].median() for each in groups]))
    if outputs.is_end:  # where single rows differ as much as they like, but not all together
        worst = [Deviation(outputs.name, typical, _FAR)]
        if not outputs.may_jump:
            together = found.pow(2).mean().sqrt() / own.pow(2).mean().sqrt()
            worst.append(Deviation(outputs.name, float(together), _TYPICAL))
    else:
        ratios = found / own.maximum(own.median())
        # With experts, those rows are left out that rounding may have sent elsewhere.
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
    """Whether rounding may send a token of a layer to other experts."""
    if dtype == torch.float32:
        return False
    kinds = {f"{name} {type(each).__name__}".lower() for name, each in layer.named_modules()}
    return any(word in kind for kind in kinds for word in ("expert", "moe"))


def _largest(ratios: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest; NaN if one is."""
    return torch.stack(list(ratios)).max()


def _unit(outputs: Outputs) -> torch.Tensor:
    """What rounding explains, squared, of each element [T, K]."""
    eps = torch.finfo(outputs.dtype).eps
    measured = outputs.own is not outputs.exact
    share = _FLOOR_MEASURED if measured else _FLOOR_UNMEASURED
    floor = max(share * eps, _LEAST_FLOOR)
    exact = torch.where(outputs.exact.isfinite(), outputs.exact.float(), 0.0)
    own = _squares(outputs.own, outputs.exact).mean(0)  # [K]
    # Where a channel is nearly zero, what was summed for it is about as large as for others.
    size = exact.pow(2).mean(0)  # [K]
    size = size.maximum(size.median())
    unit = own + (eps * exact).pow(2) / 12 + floor**2 * size
    if not measured:  # some tokens are much larger than others, and so is their rounding
        unit += floor**2 * exact.pow(2).mean(1, keepdim=True)
    return unit.clamp_min(1e-30)


def _row_errors(found: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Root mean square errors [T] in units [T, K], which are squared."""
    return (_squares(found, exact) / unit).mean(1).sqrt()


def _squares(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Squared differences [T, K] float32; infinite where either alone is no number."""
    ours, theirs = found.float(), expected.float()
    # Some models mask unused vocabulary with -inf: such entries must agree, and do not count.
    difference = torch.where(ours == theirs, 0.0, ours - theirs)
    return torch.nan_to_num(difference, nan=torch.inf).pow(2)
