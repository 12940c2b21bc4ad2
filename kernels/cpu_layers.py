"""Linear layers and normalization on CPUs, compiled, over packed weights."""

import ctypes
import math
import struct
from collections.abc import Sequence

import torch

from kernels import cpu_linear_jobs as jobs
from kernels.cpu_isa import Instructions
from kernels.cpu_linear_compile import linear_kernel, norm_kernel
from kernels.cpu_pack import PackedLayers
from kernels.cpu_threads import TeamRunner

# Work below this runs on the calling thread: waking the others would take longer. What counts is
# the larger of reading the weights and multiplying.
_SERIAL_WEIGHT_BYTES = 256 * 1024
_SERIAL_MULTIPLICATIONS = 1_000_000
_SERIAL_ELEMENTS = 64 * 1024


class CpuLayers:
    """What a model's layers call.

    Not thread-safe: scratch memory belongs to it, one call at a time.

    Args:
        instructions: what the kernels may use.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self._team = TeamRunner()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def linear(
        self,
        layers: PackedLayers,
        x: torch.Tensor,  # [..., K]
        addend: torch.Tensor | None = None,  # [..., N]
    ) -> tuple[torch.Tensor, ...]:
        """Outputs [..., N] of each of the layers; ``addend`` is added to the one there is.

        A row's result is the same whatever the other rows are, and how many.

        Raises:
            ValueError: the input does not fit the layers.
        """
        if x.shape[-1] != layers.in_features:
            raise ValueError(f"input has {x.shape[-1]} features, {layers.in_features} expected")
        kernel = linear_kernel(layers.weight.dtype, x.dtype, self.instructions)
        shape = x.shape[:-1]
        rows = x.reshape(-1, layers.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        num_rows = rows.shape[0]
        outputs = tuple(x.new_empty(*shape, n) for n in layers.out_features)
        if num_rows == 0:
            return outputs
        size = x.element_size()
        job = (ctypes.c_int64 * jobs.LINEAR_FIELDS)()
        chunk = min(num_rows, jobs.MOST_CHUNK_ROWS)
        threads = self._threads(layers, num_rows)
        scratch_bytes = jobs.scratch_bytes(chunk, layers.in_features)
        job[2:10] = [
            rows.data_ptr(),
            rows.stride(0) * size,
            num_rows,
            chunk,
            self._scratch_for(threads * scratch_bytes),
            scratch_bytes,
            layers.weight.data_ptr(),
            layers.in_features,
        ]
        job[jobs.EPILOGUE] = jobs.SILU_GATED if layers.gated else jobs.PLAIN
        if addend is not None:
            added = addend.reshape(num_rows, -1)
            if added.dtype != x.dtype or added.shape != (num_rows, *layers.out_features):
                raise ValueError(f"{tuple(addend.shape)} cannot be added to the output")
            added = added if added.stride(1) == 1 else added.contiguous()
            job[jobs.ADDEND] = added.data_ptr()
            job[jobs.ADDEND_ROW] = added.stride(0) * size
        job[jobs.NUM_GROUPS] = _describe_segments(job, layers, outputs, size)
        self._team.run(kernel.address, ctypes.addressof(job), threads)
        return outputs

    def rms_norm(
        self,
        x: torch.Tensor,  # [..., D]
        weight: torch.Tensor,  # [D] float32
        epsilon: float,
    ) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in float32.

        Raises:
            ValueError: the input does not fit the weight.
        """
        dim = x.shape[-1]
        if weight.shape != (dim,) or weight.dtype != torch.float32 or dim % jobs.PANEL:
            raise ValueError(f"weight {tuple(weight.shape)} does not fit {dim} features")
        out = torch.empty(x.shape, dtype=x.dtype)
        rows, target = x.reshape(-1, dim), out.view(-1, dim)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        size = x.element_size()
        job = (ctypes.c_int64 * jobs.NORM_FIELDS)()
        job[2:10] = [
            rows.data_ptr(),
            rows.stride(0) * size,
            target.data_ptr(),
            dim * size,
            rows.shape[0],
            dim,
            weight.data_ptr(),
            struct.unpack("<I", struct.pack("<f", epsilon))[0],
        ]
        threads = 1 if x.numel() < _SERIAL_ELEMENTS else self._team.num_threads()
        self._team.run(norm_kernel(x.dtype).address, ctypes.addressof(job), threads)
        return out

    def warm_up(self, dtype: torch.dtype, layers: Sequence[PackedLayers]) -> None:
        """Compile, or load from numba's cache, what a model with these layers will call."""
        for weight_dtype in {packed.weight.dtype for packed in layers}:
            linear_kernel(weight_dtype, dtype, self.instructions)
        norm_kernel(dtype)

    def _threads(self, layers: PackedLayers, num_rows: int) -> int:
        multiplications = num_rows * math.prod((sum(layers.out_features), layers.in_features))
        small = layers.weight.nbytes < _SERIAL_WEIGHT_BYTES
        if small and multiplications < _SERIAL_MULTIPLICATIONS:
            return 1
        return self._team.num_threads()

    def _scratch_for(self, num_bytes: int) -> int:
        """Address of that much memory, aligned to a cache line, reused from call to call."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def _describe_segments(
    job: "ctypes.Array[ctypes.c_int64]",
    layers: PackedLayers,
    outputs: Sequence[torch.Tensor],
    size: int,
) -> int:
    """Where each layer's outputs go; the number of groups of all of them."""
    first, at = 0, jobs.SEGMENTS
    parts = zip(layers.groups, layers.out_features, layers.biases, outputs, strict=True)
    for groups, out_features, bias, out in parts:
        columns = 2 * out_features if layers.gated else out_features
        job[at : at + jobs.SEGMENT_FIELDS] = [
            first,
            out.data_ptr(),
            out_features * size,
            columns,
            0 if bias is None else bias.data_ptr(),
        ]
        first += groups
        at += jobs.SEGMENT_FIELDS
    job[at] = first
    return first
