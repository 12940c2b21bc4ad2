"""Weights of linear layers in 8 or 4 bits, with a scale for each group of consecutive inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

BITS = (4, 8)
# Groups are whole vectors of the kernels.
GROUP_MULTIPLE = 16
# Rows that are quantized at once have about so many weights, which the caches hold.
_WEIGHTS_AT_ONCE = 1 << 18
# Scales that are tried, as parts of the one that reaches a group's largest weight: smaller ones
# round most weights better and cut off the largest.
_PARTS = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 8: (1.0,)}
_SMALLEST_NORMAL_HALF = 2.0**-14
_MOST_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] in few bits: value = scale * code + minimum.

    Each group of consecutive inputs of an output has a scale, and a minimum unless all are zero.
    Formats that subtract a zero point z have -scale * z as their minimum.

    Attributes:
        codes: [N, K] int8, signed: -8 to 7, or -128 to 127.
        scales: [N, K / group_size] float32.
        minimums: [N, K / group_size] float32; None: all are zero.
        bits: of a code, 4 or 8.
        group_size: inputs that share a scale: K, or a divisor of K and multiple of 16.
        input_group: inputs of a row that are rounded to int8 with one scale, before integers are
            multiplied: K, or a divisor of the group size and multiple of 16; None: they are not.

    Raises:
        ValueError: shapes, types or numbers do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    group_size: int
    input_group: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"weights of {self.bits} bits; expected 4 or 8")
        if self.codes.dim() != 2 or self.codes.dtype != torch.int8:
            raise ValueError(f"codes {tuple(self.codes.shape)} of {self.codes.dtype}")
        outputs, inputs = self.codes.shape
        if self.group_size < 1 or inputs % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {inputs} inputs")
        if self.group_size != inputs and self.group_size % GROUP_MULTIPLE:
            raise ValueError(f"groups of {self.group_size}; expected a multiple of 16")
        together = self.input_group or inputs
        if together != inputs and (self.group_size % together or together % GROUP_MULTIPLE):
            raise ValueError(f"groups of {together} inputs cannot be rounded together")
        for name, found in (("scales", self.scales), ("minimums", self.minimums)):
            if found is None:
                continue
            expected = (outputs, inputs // self.group_size)
            if found.shape != expected or found.dtype != torch.float32:
                was = f"{tuple(found.shape)} of {found.dtype}"
                raise ValueError(f"{name} {was}; expected {expected} of torch.float32")

    @property
    def rounds_rows(self) -> bool:
        """Whether all inputs of a row are rounded with one scale."""
        return self.input_group == self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """N outputs, K inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, begin: int, end: int) -> "QuantizedWeight":
        """The outputs [begin, end)."""
        minimums = None if self.minimums is None else self.minimums[begin:end]
        return replace(
            self, codes=self.codes[begin:end], scales=self.scales[begin:end], minimums=minimums
        )

    def columns(self, begin: int, end: int) -> "QuantizedWeight":
        """The inputs [begin, end), in smaller groups where these do not begin and end with groups.

        Raises:
            ValueError: such groups would not be whole vectors of the kernels.
        """
        if self.group_size == self.shape[1]:  # each output has one scale
            return replace(self, codes=self.codes[:, begin:end], group_size=end - begin)
        size = math.gcd(begin, end, self.group_size)
        if size % GROUP_MULTIPLE:
            groups = f"groups of {self.group_size} inputs"
            raise ValueError(f"{groups} cannot be cut at {begin} and {end}")

        def cut(numbers: torch.Tensor) -> torch.Tensor:
            finer = numbers.repeat_interleave(self.group_size // size, 1)
            return finer[:, begin // size : end // size]

        minimums = None if self.minimums is None else cut(self.minimums)
        return replace(
            self,
            codes=self.codes[:, begin:end],
            scales=cut(self.scales),
            minimums=minimums,
            group_size=size,
        )

    @staticmethod
    def joined(parts: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """A copy of the outputs of several weights of equal inputs and groups."""
        minimums = [each.minimums for each in parts if each.minimums is not None]
        return replace(
            parts[0],
            codes=torch.cat([each.codes for each in parts]),
            scales=torch.cat([each.scales for each in parts]),
            minimums=torch.cat(minimums) if minimums else None,
        )

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K] float32; products and sums are rounded one after the other."""
        grouped: torch.Tensor = self.codes.unflatten(1, (-1, self.group_size)).float()
        grouped *= self.scales.unsqueeze(2)
        if self.minimums is not None:
            grouped += self.minimums.unsqueeze(2)
        return grouped.flatten(1)


def fitting_group_size(in_features: int, wanted: int) -> int | None:
    """A group size of at most ``wanted`` that divides the inputs; None: there is none."""
    found = math.gcd(in_features, wanted)
    return found if found % GROUP_MULTIPLE == 0 else None


def quantize(
    weight: torch.Tensor,  # [N, K], floating point
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    input_group: int | None = None,
) -> QuantizedWeight:
    """Round a weight to few bits, with small squared errors in each group.

    For each group some scales are tried; each is fitted to the codes that it leads to, by least
    squares. Scales and minimums have the 11 bits of float16 where its range allows that.

    Raises:
        ValueError: the group size does not fit, or a weight is not finite.
    """
    outputs, inputs = weight.shape
    if group_size < 1 or inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {inputs} inputs")
    groups = weight.detach().reshape(-1, group_size)  # [N * K / group_size, group_size]
    codes = torch.empty(groups.shape, dtype=torch.int8, device=weight.device)
    numbers = torch.empty(2, len(groups), device=weight.device)
    step = max(1, _WEIGHTS_AT_ONCE // group_size)
    for begin in range(0, len(groups), step):
        some = slice(begin, begin + step)
        found = _Groups(groups[some].T.float().contiguous(), bits, symmetric)
        codes[some] = found.codes.T
        numbers[0, some], numbers[1, some] = found.best
    scales, minimums = numbers.unflatten(1, (outputs, -1))
    return QuantizedWeight(
        codes.view(outputs, inputs),
        scales,
        None if symmetric else minimums,
        bits,
        group_size,
        input_group,
    )


class _Groups:
    """Quantizes groups of weights [group_size, groups] float32.

    Attributes:
        best: scales and minimums [groups].
        codes: [group_size, groups].
    """

    def __init__(self, weights: torch.Tensor, bits: int, symmetric: bool) -> None:
        low, high = weights.aminmax(dim=0)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError("a weight is not finite")
        self._weights = weights
        self._symmetric = symmetric
        self._most = 2 ** (bits - 1) - 1
        self._least = -self._most - 1
        self.best, self._error = (low, high), torch.full_like(low, torch.inf)
        widest = torch.maximum(-low, high) / self._most
        if not symmetric:
            widest = (high - low) / (self._most - self._least)
        for part in _PARTS[bits]:
            scale = _in_half(widest * part)
            # Codes are centered at -1/2.
            center = torch.zeros_like(scale) if symmetric else (high + low + scale) / 2
            codes = self._try(scale, _shift_in_half(center, scale))
            if len(_PARTS[bits]) > 1:
                self._try(*self._fitted(codes))
        self.codes = self._nearest(*self.best).to(torch.int8)

    def _try(self, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        """Keep the numbers for the groups whose errors they make smaller; returns the codes."""
        codes = self._nearest(scale, minimum)
        error = torch.addcmul(minimum, codes, scale).sub_(self._weights).square_().sum(0)
        is_better = error < self._error
        self._error = torch.where(is_better, error, self._error)
        self.best = (
            torch.where(is_better, scale, self.best[0]),
            torch.where(is_better, minimum, self.best[1]),
        )
        return codes

    def _nearest(self, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        """The nearest codes, as float32."""
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        found = (self._weights - minimum).mul_(inverse)
        return found.round_().clamp_(self._least, self._most)

    def _fitted(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and minimums with the least squared errors for given codes, which change."""
        if self._symmetric:
            products = (codes * self._weights).sum(0)
            squares = codes.square_().sum(0)
            scale = torch.where(squares == 0, 0.0, products / squares)
            return _in_half(scale), torch.zeros_like(scale)
        mean = codes.mean(0)
        centered = codes.sub_(mean)
        products = (centered * self._weights).sum(0)
        squares = centered.square_().sum(0)
        scale = _in_half(torch.where(squares == 0, 0.0, products / squares))
        return scale, _shift_in_half(self._weights.mean(0) - scale * mean, scale)


def _in_half(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to the 11 bits of float16, unless they are outside its normal range."""
    return torch.where(_is_normal_half(numbers), numbers.half().float(), numbers)


def _shift_in_half(minimums: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same; below the normal range as well, if the steps between values are in it."""
    served = _is_normal_half(scales) & (minimums.abs() <= _MOST_HALF)
    return torch.where(served, minimums.half().float(), minimums)


def _is_normal_half(numbers: torch.Tensor) -> torch.Tensor:
    size = numbers.abs()
    return (size >= _SMALLEST_NORMAL_HALF) & (size <= _MOST_HALF)
