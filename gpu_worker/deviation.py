"""How far logits are from those they should be, and whether rounding alone explains it.

In a mixture of experts it may: a token whose experts are nearly tied goes to another one when
anything is rounded otherwise, and its logits are far off then, while those of other tokens are not.
How far that takes a model of half precision is measured on itself, where it matters. A mistake is
another thing: of the rows that are computed alike it makes most wrong, whatever rounding does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.model import RaggedModel

_TOLERANCE = {torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Of what other rounding was seen to do: few draws do not show the most.
_ALLOWANCE = 1.5
_MOST = 0.5  # whatever rounding does
_DRAWS = 4


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        deviation: distance of the logits from those they should be, relative to their spread.
        tolerance: the largest deviation that passes.
        num_tokens: tokens compared.
    """

    deviation: float
    tolerance: float
    num_tokens: int

    @property
    def passed(self) -> bool:
        """Whether rounding explains it; NaN does not pass."""
        return self.deviation <= self.tolerance


def row_errors(
    found: torch.Tensor,  # [T, vocabulary]
    expected: torch.Tensor,  # [T, vocabulary]
) -> torch.Tensor:
    """Mean square differences [T] float32 in units of each row's own spread."""
    ours, theirs = found.float(), expected.float()
    # Some models mask unused vocabulary with -inf: such entries must agree, and do not count.
    finite = theirs.isfinite()
    difference = torch.where(ours == theirs, 0.0, ours - theirs)
    difference = torch.nan_to_num(difference, nan=torch.inf).pow(2).mean(1)
    return difference / torch.where(finite, theirs, 0.0).var(1).clamp_min(1e-18)


def judge(
    model: RaggedModel,
    sequences: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    errors: Sequence[torch.Tensor],
    groups: Sequence[torch.Tensor],
) -> CheckResult:
    """Whether rounding explains the errors.

    Args:
        model: that computed the logits.
        sequences: token ids [T] of each sequence.
        expected: logits [T, vocabulary] of each by transformers' own attention.
        errors: of each, as ``row_errors`` has them.
        groups: errors of rows that one mistake would make wrong together.
    """
    deviation = max(map(_mean, errors))
    tolerance = _TOLERANCE[model.dtype]
    typical = max(float(group.median().sqrt()) for group in groups)
    if typical <= tolerance < deviation and model.dtype != torch.float32:
        moved = _ALLOWANCE * _rounding(model, sequences, expected)
        tolerance = max(tolerance, min(moved, _MOST))
    return CheckResult(deviation, tolerance, sum(map(len, sequences)))


def _mean(errors: torch.Tensor) -> float:
    """Root mean square over all rows."""
    return float(errors.mean().sqrt())


def _rounding(
    model: RaggedModel, sequences: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> float:
    """How far the model's own logits move when its layers round otherwise."""
    generator = torch.Generator().manual_seed(2)
    moved: list[float] = []
    with _rounding_otherwise(model, generator):
        for _ in range(_DRAWS):
            for tokens, logits in zip(sequences, expected, strict=True):
                moved.append(_mean(row_errors(model.eager_logits(tokens), logits)))
    return max(moved)


@contextmanager
def _rounding_otherwise(model: RaggedModel, generator: torch.Generator) -> Iterator[None]:
    """Meanwhile what layers return is off by up to what rounding it may cost."""
    most = torch.finfo(model.dtype).eps / 2

    def shake(_module: Any, _args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.dtype != model.dtype:
            return output
        factor = 1 + most * (2 * torch.rand(output.shape, generator=generator) - 1)
        return (output.float() * factor.to(output.device)).to(output.dtype)

    leaves = [module for module in model.model.modules() if not any(module.children())]
    hooks = [module.register_forward_hook(shake) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
