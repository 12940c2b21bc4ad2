"""Linear layers and normalization on CPUs, compiled, over packed weights."""

import ctypes

import torch

from kernels.checks import check_rotary
from kernels.cpu.elementwise.elementwise import CpuElements
from kernels.cpu.linear import linear_arguments as jobs
from kernels.cpu.linear.entry_points import (
    layer_norm_kernel,
    linear_kernel,
    norm_kernel,
    rotary_kernel,
)
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.instruction_set import Instructions
from kernels.cpu.runtime.kernel_arguments import float_bits
from kernels.cpu.runtime.thread_team import TeamRunner

# Work below this runs on the calling thread: waking the others would take longer. What counts is
# the larger of reading the weights and multiplying.
_SERIAL_WEIGHT_BYTES = 256 * 1024
_SERIAL_MULTIPLICATIONS = 1_000_000
_SERIAL_ELEMENTS = 64 * 1024


class CpuLayers:
    """What the compiled layers of a model share: threads and scratch memory.

    Not thread-safe: one call at a time.

    Args:
        instructions: what the kernels may use.

    Attributes:
        elements: what is computed element by element.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self._team = TeamRunner()
        self.elements = CpuElements(self._team)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def linear(self, layers: PackedLayers, dtype: torch.dtype) -> "CompiledLinear":
        """These layers for inputs of a type; compiled now, or loaded from numba's cache."""
        return CompiledLinear(self, layers, dtype)

    def rms_norm(self, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> "CompiledNorm":
        """A normalization for inputs of a type; compiled now, or loaded from numba's cache."""
        return CompiledNorm(self, norm_kernel(dtype), weight, None, epsilon, dtype)

    def layer_norm(
        self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, dtype: torch.dtype
    ) -> "CompiledNorm":
        """The same by mean and variance."""
        return CompiledNorm(self, layer_norm_kernel(dtype), weight, bias, epsilon, dtype)

    def rotary(self, dtype: torch.dtype) -> "CompiledRotary":
        """Rotary embeddings for elements of a type; compiled now, or loaded from numba's cache."""
        return CompiledRotary(self, dtype)

    def num_threads(self) -> int:
        """Threads that a large job gets."""
        return self._team.num_threads()

    def run(self, kernel: Kernel, job: int, num_threads: int) -> None:
        """Enter a kernel with so many threads; returns when all are done."""
        self._team.run(kernel, job, num_threads)

    def scratch(self, num_bytes: int) -> int:
        """Address of that much memory, aligned to a cache line, reused from call to call."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


class CompiledLinear:
    """A linear layer, or layers that share their input, as one call.

    A row's result is the same whatever the other rows are, and how many.

    Attributes:
        layers: their weights.
    """

    def __init__(self, kernels: CpuLayers, layers: PackedLayers, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._kernel = linear_kernel(layers.weight.dtype, dtype, kernels.instructions)
        self.layers = layers
        self._dtype = dtype
        self._job = (ctypes.c_int64 * jobs.LINEAR_FIELDS)()
        self._address = ctypes.addressof(self._job)
        self._in_features = layers.in_features
        self._out_features = layers.out_features
        self._out_fields = tuple(
            jobs.SEGMENTS + index * jobs.SEGMENT_FIELDS + jobs.OUT
            for index in range(len(layers.out_features))
        )
        self._multiplications = layers.weight.numel()  # per row
        self._is_small = layers.weight.nbytes < _SERIAL_WEIGHT_BYTES
        self._describe()

    def __call__(
        self,
        x: torch.Tensor,  # [..., K]
        addend: torch.Tensor | None = None,  # [..., N]
    ) -> list[torch.Tensor]:
        """Outputs [..., N] of each of the layers; ``addend`` is added to the one there is.

        Raises:
            ValueError: the input does not fit the layers.
        """
        shape = x.shape
        if shape[-1] != self._in_features or x.dtype != self._dtype:
            expected = f"[..., {self._in_features}] of {self._dtype}"
            raise ValueError(f"input {tuple(shape)} of {x.dtype}; expected {expected}")
        if not x.is_contiguous():
            x = x.contiguous()
        num_rows = x.numel() // self._in_features
        outputs = [x.new_empty((*shape[:-1], n)) for n in self._out_features]
        if num_rows == 0:
            return outputs
        chunk = min(num_rows, jobs.MOST_CHUNK_ROWS)
        multiplications = num_rows * self._multiplications
        serial = self._is_small and multiplications < _SERIAL_MULTIPLICATIONS
        threads = 1 if serial else self._kernels.num_threads()
        scratch_bytes = jobs.scratch_bytes(chunk, self._in_features)
        scratch = self._kernels.scratch(threads * scratch_bytes)
        job = self._job
        row_bytes = self._in_features * self._dtype.itemsize
        job[0:8] = [0, 0, x.data_ptr(), row_bytes, num_rows, chunk, scratch, scratch_bytes]
        for place, out in zip(self._out_fields, outputs, strict=True):
            job[place] = out.data_ptr()
        job[jobs.ADDEND] = 0
        if addend is not None:
            if addend.shape != outputs[0].shape or addend.dtype != self._dtype:
                raise ValueError(f"{tuple(addend.shape)} cannot be added to {outputs[0].shape}")
            addend = addend.contiguous()
            job[jobs.ADDEND] = addend.data_ptr()
            job[jobs.ADDEND_ROW] = addend.shape[-1] * self._dtype.itemsize
        self._kernels.run(self._kernel, self._address, threads)
        return outputs

    def _describe(self) -> None:
        """All that is the same in every call."""
        layers, job = self.layers, self._job
        job[jobs.WEIGHT] = layers.weight.data_ptr()
        job[jobs.IN_FEATURES] = layers.in_features
        job[jobs.EPILOGUE] = jobs.SILU_GATED if layers.gated else jobs.PLAIN
        first, at = 0, jobs.SEGMENTS
        for groups, out_features, bias in zip(
            layers.groups, layers.out_features, layers.biases, strict=True
        ):
            job[at : at + jobs.SEGMENT_FIELDS] = [
                first,
                0,
                out_features * self._dtype.itemsize,
                2 * out_features if layers.gated else out_features,
                0 if bias is None else bias.data_ptr(),
            ]
            first += groups
            at += jobs.SEGMENT_FIELDS
        job[at] = job[jobs.NUM_GROUPS] = first


class CompiledNorm:
    """Rows brought to one size, times a weight, computed in float32.

    By the root mean square: x / sqrt(mean(x^2) + epsilon) * weight. By mean and variance:
    (x - mean) / sqrt(variance + epsilon) * weight + bias.

    Args:
        kernels: of the model.
        kernel: for inputs and outputs of ``dtype``.
        weight: [D] float32.
        bias: [D] float32, for the kernel that adds one.
        epsilon: keeps rows of zeros finite.
        dtype: of inputs and outputs.
    """

    def __init__(
        self,
        kernels: CpuLayers,
        kernel: Kernel,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        for each in (weight, weight if bias is None else bias):
            if each.dtype != torch.float32 or len(each) % jobs.PANEL or len(each) != len(weight):
                raise ValueError(f"weight [{len(each)}] of {each.dtype} is not served")
        self._kernels = kernels
        self._kernel = kernel
        self._bias = bias
        self._weight = weight
        self._dim = len(weight)
        self._dtype = dtype
        self._job = (ctypes.c_int64 * jobs.NORM_FIELDS)()
        self._address = ctypes.addressof(self._job)
        self._job[jobs.NORM_DIM] = self._dim
        self._job[jobs.NORM_WEIGHT] = weight.data_ptr()
        self._job[jobs.NORM_EPSILON] = float_bits(epsilon)
        self._job[jobs.NORM_BIAS] = 0 if bias is None else bias.data_ptr()

    def __call__(
        self,
        x: torch.Tensor,  # [..., D]
    ) -> torch.Tensor:
        """Normalized rows [..., D].

        Raises:
            ValueError: the input does not fit the weight.
        """
        if x.shape[-1] != self._dim or x.dtype != self._dtype:
            expected = f"[..., {self._dim}] of {self._dtype}"
            raise ValueError(f"input {tuple(x.shape)} of {x.dtype}; expected {expected}")
        if not x.is_contiguous():
            if x.dim() == 4 and x.transpose(1, 2).is_contiguous():  # heads, turned before
                return self(x.transpose(1, 2)).transpose(1, 2)
            x = x.contiguous()
        out = torch.empty_like(x)
        size = x.numel()
        row_bytes = self._dim * self._dtype.itemsize
        num_rows = size // self._dim
        self._job[0:7] = [0, 0, x.data_ptr(), row_bytes, out.data_ptr(), row_bytes, num_rows]
        threads = 1 if size < _SERIAL_ELEMENTS else self._kernels.num_threads()
        self._kernels.run(self._kernel, self._address, threads)
        return out


class CompiledRotary:
    """Queries and keys turned by their positions: x * cos + (-right, left) * sin.

    Left and right are the halves of a head, or of its first Dr elements (RoFormer, in the order of
    GPT-NeoX).

    Args:
        kernels: of the model.
        dtype: of all inputs and outputs.
    """

    def __init__(self, kernels: CpuLayers, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._kernel = rotary_kernel(dtype)
        self._dtype = dtype
        self._job = (ctypes.c_int64 * jobs.ROTARY_FIELDS)()
        self._address = ctypes.addressof(self._job)

    def __call__(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        cos: torch.Tensor,  # [T, Dr]
        sin: torch.Tensor,  # [T, Dr]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, D] and keys [T, Hkv, D], contiguous.

        Raises:
            ValueError: shapes or types do not fit each other.
        """
        check_rotary(query, key, cos, sin)
        if not query.dtype == cos.dtype == sin.dtype == self._dtype:
            raise ValueError(f"{query.dtype}, cos {cos.dtype}; expected {self._dtype}")
        num_tokens, num_heads, head_dim = query.shape
        query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
        if num_tokens == 0:
            return query_out, key_out
        size = self._dtype.itemsize
        self._job[0:2] = [0, 0]
        for at, x, out in ((jobs.QUERY, query, query_out), (jobs.KEY, key, key_out)):
            token, head, _ = x.stride()
            self._job[at : at + 4] = [x.data_ptr(), token * size, head * size, out.data_ptr()]
        self._job[jobs.COS : jobs.ROTARY_FIELDS] = [
            cos.data_ptr(),
            cos.stride(0) * size,
            sin.data_ptr(),
            sin.stride(0) * size,
            num_tokens,
            num_heads,
            key.shape[1],
            head_dim,
            cos.shape[1],
        ]
        serial = query.numel() < _SERIAL_ELEMENTS
        threads = 1 if serial else self._kernels.num_threads()
        self._kernels.run(self._kernel, self._address, threads)
        return query_out, key_out
