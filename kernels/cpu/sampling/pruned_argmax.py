"""The pruned argmax of a packed output layer on CPUs (see pruned_argmax_kernel)."""

import ctypes

import numpy as np
import torch

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.linear_arguments import MOST_BLOCK_ROWS, PANEL, TILE_ROW
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.sampling import pruned_argmax_arguments as fields
from kernels.cpu.sampling.pruned_argmax_entry_points import is_served, pruned_argmax_kernels
from kernels.cpu.sampling.quantized_weights import QuantizedWeights, can_quantize, quantize_weights
from kernels.interface import RowArgmax

# Most panels that are computed for a row: a share of all, or so many in any case. If more may have
# the largest output, the layer itself is faster.
_MAX_SHARE = 16
_MAX_IN_ANY_CASE = 32


class PrunedArgmax:
    """Argmax over a layer's float32 outputs for bfloat16 rows; the layer's own, bit for bit.

    Args:
        kernels: of the model, for instructions that ``pruned_argmax_entry_points`` serves.
        layers: the layer.
        weights: its quantized weights.
        max_rows: of a call.
    """

    def __init__(
        self, kernels: CpuLayers, layers: PackedLayers, weights: QuantizedWeights, max_rows: int
    ) -> None:
        self._kernels = kernels
        self._compiled = pruned_argmax_kernels(kernels.instructions)
        self._layers = layers
        self._weights = weights
        self._max_rows = max_rows
        num_inputs, num_outputs = layers.in_features, layers.out_features[0]
        num_panels = -(-num_outputs // PANEL)
        # An odd number of lines, so that rows do not meet in the caches.
        row_bytes = (-(-num_inputs // 64) | 1) * 64
        bounds_row = -(-num_panels // 16) * 16
        self._quantized_rows = torch.empty(2 * max_rows * row_bytes, dtype=torch.int8)
        self._stats = torch.empty(max_rows * fields.STATS_BYTES, dtype=torch.uint8)
        self._residual = torch.empty(num_inputs)
        self._num_residuals = np.zeros(1, np.int32)
        # Columns of padding stay as they are: no threshold reaches them. The others take memory
        # once a step has so many rows.
        self._bounds = np.empty((max_rows, bounds_row), np.float32)
        self._bounds[:, num_panels:] = -np.inf
        self._found = RowArgmax(np.zeros(max_rows, np.int64), np.zeros(max_rows, np.float32))
        self._arguments = (ctypes.c_int64 * fields.PRUNED_ARGMAX_LAYOUT.num_fields)()
        self._address = ctypes.addressof(self._arguments)
        constants = {
            fields.INPUT_ROW: 2 * num_inputs,
            fields.SCRATCH_BYTES: (2 * max_rows + MOST_BLOCK_ROWS) * TILE_ROW,
            fields.IN_FEATURES: num_inputs,
            fields.OUT_FEATURES: num_outputs,
            fields.WEIGHT: layers.weight.data_ptr(),
            fields.QUANTIZED: weights.quantized.data_ptr(),
            fields.SCALES: weights.scales.data_ptr(),
            fields.ERRORS: weights.errors.data_ptr(),
            fields.NORMS: weights.norms.data_ptr(),
            fields.QUANTIZED_ROWS: self._quantized_rows.data_ptr(),
            fields.ROW_BYTES: row_bytes,
            fields.STATS: self._stats.data_ptr(),
            fields.NUM_RESIDUALS: self._num_residuals.ctypes.data,
            fields.RESIDUAL: self._residual.data_ptr(),
            fields.BOUNDS: self._bounds.ctypes.data,
            fields.BOUNDS_ROW: 4 * bounds_row,
            fields.MAX_PANELS: max(_MAX_IN_ANY_CASE, num_panels // _MAX_SHARE),
            fields.TOKENS: self._found.tokens.ctypes.data,
            fields.VALUES: self._found.values.ctypes.data,
        }
        for place, number in constants.items():
            self._arguments[place] = number

    @property
    def nbytes(self) -> int:
        """Memory of the quantized weights."""
        return self._weights.nbytes

    def __call__(
        self,
        x: torch.Tensor,  # [R, K]
    ) -> RowArgmax:
        """The argmax of the rows.

        Raises:
            ValueError: the input does not fit the layer, or there are too many rows.
        """
        expected = self._layers.in_features
        if x.dim() != 2 or x.shape[1] != expected or x.dtype != torch.bfloat16:
            raise ValueError(
                f"input {tuple(x.shape)} of {x.dtype}; expected [R, {expected}] of torch.bfloat16"
            )
        if not 0 < len(x) <= self._max_rows:
            raise ValueError(f"{len(x)} rows; 1 to {self._max_rows} are served")
        x = x.contiguous()
        threads = self._kernels.num_threads()
        arguments = self._arguments
        arguments[fields.INPUT], arguments[fields.NUM_ROWS] = x.data_ptr(), len(x)
        arguments[fields.SCRATCH] = self._kernels.scratch(threads * arguments[fields.SCRATCH_BYTES])
        for kernel in self._compiled:
            arguments[0:2] = [0, 0]
            self._kernels.run(kernel, self._address, threads)
        return self.found(len(x))

    def found(self, num_rows: int) -> RowArgmax:
        """The argmax of the first rows, once the kernels have run."""
        return RowArgmax(self._found.tokens[:num_rows], self._found.values[:num_rows])


def find_pruned_argmax(
    kernels: CpuLayers, layers: PackedLayers, max_rows: int
) -> PrunedArgmax | None:
    """The pruned argmax of a layer, if the layer and this CPU allow one."""
    if not is_served(kernels.instructions) or not can_quantize(layers):
        return None
    weights = quantize_weights(layers)
    return None if weights is None else PrunedArgmax(kernels, layers, weights, max_rows)
