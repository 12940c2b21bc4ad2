"""Modules that replace layers of transformers and launch Triton kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear

from kernels.triton import layers

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Inputs [..., K], weight [N, K] and bias [N] to outputs [..., N]."""


def linear_function(deterministic: bool) -> Linear:
    """Torch's function; if deterministic, one whose rows do not depend on each other."""
    return layers.linear if deterministic else torch_linear


class JoinedLinear(nn.Module):
    """Linear layers that share their input, as one product; called for a list of outputs.

    Args:
        linears: of one type, all with a bias or all without.
        linear: computes it.
    """

    def __init__(self, linears: Sequence[nn.Linear], linear: Linear) -> None:
        super().__init__()
        weights: list[torch.Tensor] = [layer.weight for layer in linears]
        biases: list[torch.Tensor] = [layer.bias for layer in linears if layer.bias is not None]
        self.weight = _frozen(torch.cat(weights))
        self.bias = _frozen(torch.cat(biases)) if biases else None
        self._linear = linear
        self._sizes = [layer.out_features for layer in linears]

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> list[torch.Tensor]:
        """Outputs [..., N] of each layer: views of one tensor."""
        return list(torch.split(self._linear(x, self.weight, self.bias), self._sizes, -1))

    @staticmethod
    def can_join(linears: Sequence[nn.Linear]) -> bool:
        """Whether these can be one product."""
        biased = {layer.bias is not None for layer in linears}
        return len({layer.in_features for layer in linears}) == len(biased) == 1


class RowLinear(nn.Module):
    """A linear layer whose rows have the same bits in every batch.

    Args:
        weight: not copied, so that modules that share it still do.
        bias: [N].
        transposed: the weight is [K, N], else [N, K].
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._transposed = transposed

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N]."""
        weight = self.weight.T if self._transposed else self.weight
        return layers.linear(x, weight, self.bias)


class TritonGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): a matrix product, the gate, a matrix product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, linear: Linear) -> None:
        super().__init__()
        joined = JoinedLinear([gate, up], linear)
        self.gate_up_weight, self.gate_up_bias = joined.weight, joined.bias
        self.down_weight, self.down_bias = down.weight, down.bias
        self._linear = linear

    def forward(
        self,
        x: torch.Tensor,  # [..., hidden]
    ) -> torch.Tensor:
        """Outputs [..., hidden]."""
        gate_up = self._linear(x, self.gate_up_weight, self.gate_up_bias)
        return self._linear(layers.silu_gate(gate_up), self.down_weight, self.down_bias)


class TritonRMSNorm(nn.Module):
    """Root-mean-square normalization in one launch.

    Args:
        factor: [K] float32, by which normalized rows are multiplied.
        epsilon: keeps rows of zeros finite.
    """

    def __init__(self, factor: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = _frozen(factor)
        self._epsilon = epsilon
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Normalized rows [..., K]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        return layers.rms_norm(x, self.weight, self._epsilon)

    def of_sum(
        self,
        x: torch.Tensor,  # [..., K]
        residual: torch.Tensor,  # [..., K]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum [..., K] and its normalized rows, in one launch."""
        return layers.add_rms_norm(x, residual, self.weight, self._epsilon)

    def sum_ahead(
        self,
        x: torch.Tensor,  # [..., K]
        residual: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """The sum [..., K], whose normalized rows the next call of the module returns."""
        self._ahead = self.of_sum(x, residual)
        return self._ahead[0]


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
