"""The likeliest outputs of a packed output layer on CPUs (see pruned_argmax_kernel)."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.linear_arguments import MOST_BLOCK_ROWS, PANEL, TILE_ROW
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.sampling import pruned_argmax_arguments as jobs
from kernels.cpu.sampling.pruned_argmax_entry_points import is_served, screen_kernels
from kernels.cpu.sampling.quantized_weights import ScreenWeights, can_screen, pack_for_screening

# Panels that are computed for a row at most: if more may have the largest output, the layer itself
# is faster. A share of all, and so many in any case.
_MOST_SHARE = 16
_MOST_IN_ANY_CASE = 32


@dataclass(frozen=True, slots=True)
class Likeliest:
    """What a step of R rows has found, until the next one runs.

    Attributes:
        tokens: [R] int64, where each row has its largest output first.
        best: [R] float32, that output.
    """

    tokens: npt.NDArray[np.int64]
    best: npt.NDArray[np.float32]

    @property
    def decided(self) -> bool:
        """Whether all rows were; else the layer has to be computed."""
        return bool(self.tokens.min() >= 0)


class CompiledScreen:
    """The likeliest outputs of a layer for bfloat16 rows; the same as the layer's, bit for bit.

    Args:
        kernels: of the model, for instructions that ``pruned_argmax_entry_points`` serves.
        layers: the layer.
        weights: its codes.
        most_rows: of a call.
    """

    def __init__(
        self, kernels: CpuLayers, layers: PackedLayers, weights: ScreenWeights, most_rows: int
    ) -> None:
        self._kernels = kernels
        self._compiled = screen_kernels(kernels.instructions)
        self._layers = layers
        self._weights = weights
        self._most_rows = most_rows
        num_inputs, num_outputs = layers.in_features, layers.out_features[0]
        num_panels = -(-num_outputs // PANEL)
        # An odd number of lines, so that rows do not meet in the caches.
        row_bytes = (-(-num_inputs // 64) | 1) * 64
        bounds_row = -(-num_panels // 16) * 16
        self._codes = torch.empty(2 * most_rows * row_bytes, dtype=torch.int8)
        self._facts = torch.empty(most_rows * jobs.FACT_BYTES, dtype=torch.uint8)
        self._rest = torch.empty(num_inputs)
        self._num_fine = np.zeros(1, np.int32)
        # Columns of padding stay as they are: nobody reaches them. The others take memory when a
        # step has so many rows, if ever.
        self._bounds = np.empty((most_rows, bounds_row), np.float32)
        self._bounds[:, num_panels:] = -np.inf
        self._found = Likeliest(np.zeros(most_rows, np.int64), np.zeros(most_rows, np.float32))
        self._job = (ctypes.c_int64 * jobs.SCREEN_FIELDS)()
        self._address = ctypes.addressof(self._job)
        told = {
            jobs.INPUT_ROW: 2 * num_inputs,
            jobs.SCRATCH_BYTES: (2 * most_rows + MOST_BLOCK_ROWS) * TILE_ROW,
            jobs.IN_FEATURES: num_inputs,
            jobs.OUT_FEATURES: num_outputs,
            jobs.WEIGHT: layers.weight.data_ptr(),
            jobs.CODES: weights.codes.data_ptr(),
            jobs.SCALES: weights.scales.data_ptr(),
            jobs.ERRORS: weights.errors.data_ptr(),
            jobs.NORMS: weights.norms.data_ptr(),
            jobs.ROW_CODES: self._codes.data_ptr(),
            jobs.ROW_BYTES: row_bytes,
            jobs.FACTS: self._facts.data_ptr(),
            jobs.NUM_FINE: self._num_fine.ctypes.data,
            jobs.REST: self._rest.data_ptr(),
            jobs.BOUNDS: self._bounds.ctypes.data,
            jobs.BOUNDS_ROW: 4 * bounds_row,
            jobs.MOST_PANELS: max(_MOST_IN_ANY_CASE, num_panels // _MOST_SHARE),
            jobs.TOKENS: self._found.tokens.ctypes.data,
            jobs.BEST: self._found.best.ctypes.data,
        }
        for place, number in told.items():
            self._job[place] = number

    @property
    def nbytes(self) -> int:
        """Memory of the codes of the weights."""
        return self._weights.nbytes

    def __call__(
        self,
        x: torch.Tensor,  # [R, K]
    ) -> Likeliest:
        """The likeliest outputs of the rows.

        Raises:
            ValueError: the input does not fit the layer, or there are too many rows.
        """
        expected = self._layers.in_features
        if x.dim() != 2 or x.shape[1] != expected or x.dtype != torch.bfloat16:
            raise ValueError(
                f"input {tuple(x.shape)} of {x.dtype}; expected [R, {expected}] of torch.bfloat16"
            )
        if not 0 < len(x) <= self._most_rows:
            raise ValueError(f"{len(x)} rows; 1 to {self._most_rows} are served")
        x = x.contiguous()
        threads = self._kernels.num_threads()
        job = self._job
        job[jobs.INPUT], job[jobs.NUM_ROWS] = x.data_ptr(), len(x)
        job[jobs.SCRATCH] = self._kernels.scratch(threads * job[jobs.SCRATCH_BYTES])
        for kernel in self._compiled:
            job[0:2] = [0, 0]
            self._kernels.run(kernel, self._address, threads)
        return self.found(len(x))

    def found(self, num_rows: int) -> Likeliest:
        """What the kernels have written of so many rows, whoever ran them."""
        return Likeliest(self._found.tokens[:num_rows], self._found.best[:num_rows])


def find_screen(kernels: CpuLayers, layers: PackedLayers, most_rows: int) -> CompiledScreen | None:
    """A screen for a layer's bfloat16 rows, if there is one for the layer and this CPU."""
    if not is_served(kernels.instructions) or not can_screen(layers):
        return None
    weights = pack_for_screening(layers)
    return None if weights is None else CompiledScreen(kernels, layers, weights, most_rows)
