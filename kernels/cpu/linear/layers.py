"""The layers of a model on CPUs, and linear layers over packed weights."""

import ctypes
from typing import Protocol

import torch

from kernels.cpu.elementwise.elementwise import CpuElements
from kernels.cpu.elementwise.norm import CpuNorm
from kernels.cpu.elementwise.norm_kernel import layer_norm_kernel, norm_kernel
from kernels.cpu.elementwise.rotary import CpuRotary
from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.library_blocks import Library
from kernels.cpu.linear.linear_kernel import linear_kernel
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.quantized.quantized_kernel import quantized_kernel
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.instruction_set import Instructions
from kernels.cpu.runtime.thread_team import ThreadTeam

# Less is left to the calling thread: waking the others would take longer. What counts is the larger
# of reading the weights and multiplying.
_SERIAL_WEIGHT_BYTES = 256 * 1024
_SERIAL_MULTIPLICATIONS = 1_000_000


class Trial(Protocol):
    """Decides who multiplies."""

    def choose(self, linear: "CpuLinear") -> object:
        """Let a layer use a library or not."""


class CpuLayers:
    """Makes the layers of a model, which share threads and scratch memory.

    Their kernels are compiled when a layer is made, or loaded from numba's cache. Not thread-safe:
    one call at a time.

    Args:
        instructions: that kernels may use.
        trial: lets a library multiply where it is faster; None: it never does.

    Attributes:
        elements: functions that are computed element by element.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, instructions: Instructions, trial: Trial | None = None) -> None:
        self.instructions = instructions
        self._trial = trial
        self._team = ThreadTeam()
        self.elements = CpuElements(self._team)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def linear(
        self, layers: PackedLayers, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> "CpuLinear":
        """One linear layer, or several that share their input, for inputs of a type.

        Outputs have the same type, or are not rounded to it: ``out_dtype`` float32.
        """
        linear = CpuLinear(self, layers, dtype, out_dtype or dtype)
        if self._trial is not None and layers.form is None:
            self._trial.choose(linear)
        return linear

    def rms_norm(self, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> "CpuNorm":
        """RMS normalization of rows [D] by a weight [D] float32, for inputs of a type."""
        return CpuNorm(self._team, norm_kernel(dtype), weight, None, epsilon, dtype)

    def layer_norm(
        self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, dtype: torch.dtype
    ) -> "CpuNorm":
        """The same by mean and variance, with a bias [D] float32."""
        return CpuNorm(self._team, layer_norm_kernel(dtype), weight, bias, epsilon, dtype)

    def rotary(self, dtype: torch.dtype) -> "CpuRotary":
        """Rotary embeddings of elements of a type."""
        return CpuRotary(self._team, dtype)

    def num_threads(self) -> int:
        """Threads of a large call."""
        return self._team.num_threads()

    def run(self, kernel: Kernel, address: int, num_threads: int) -> None:
        """Run a kernel with the arguments at an address; returns when all threads are done."""
        self._team.run(kernel, address, num_threads)

    def scratch(self, num_bytes: int) -> int:
        """Address of so much memory on a cache line, reused from call to call."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


class CpuLinear:
    """A linear layer, or layers that share their input, as one call.

    A row's result is the same whatever the other rows are, and how many.

    Attributes:
        layers: their weights.
        out_dtype: of outputs.
    """

    def __init__(
        self,
        kernels: CpuLayers,
        layers: PackedLayers,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> None:
        if out_dtype != dtype and (out_dtype != torch.float32 or layers.gated):
            raise ValueError(f"no CPU kernel for inputs of {dtype} and outputs of {out_dtype}")
        self._kernels = kernels
        form, instructions = layers.form, kernels.instructions
        if form is None:
            self._kernel = linear_kernel(layers.weight.dtype, dtype, instructions)
        else:
            self._kernel = quantized_kernel(form, dtype, instructions)
        self.layers = layers
        self._dtype = dtype
        self.out_dtype = out_dtype
        self._args = (ctypes.c_int64 * fields.LINEAR_LAYOUT.num_fields)()
        self._address = ctypes.addressof(self._args)
        self._in_features = layers.in_features
        self._out_features = layers.out_features
        self._out_fields = tuple(
            fields.SEGMENTS + index * fields.SEGMENT_FIELDS + fields.OUT
            for index in range(len(layers.out_features))
        )
        outputs = sum(layers.groups) * fields.GROUP_OUTPUTS
        self._multiplications = layers.in_features * outputs  # per row
        self._is_small = layers.weight.nbytes < _SERIAL_WEIGHT_BYTES
        self._write_constants()

    def __call__(
        self,
        x: torch.Tensor,  # [..., K]
        addend: torch.Tensor | None = None,  # [..., N]
        on_one_thread: bool = False,
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
        outputs = [x.new_empty((*shape[:-1], n), dtype=self.out_dtype) for n in self._out_features]
        if num_rows == 0:
            return outputs
        chunk = min(num_rows, self._kernel.layout.max_chunk_rows)
        multiplications = num_rows * self._multiplications
        serial = self._is_small and multiplications < _SERIAL_MULTIPLICATIONS
        threads = 1 if serial or on_one_thread else self._kernels.num_threads()
        scratch_bytes = self._scratch_bytes(chunk)
        scratch = self._kernels.scratch(threads * scratch_bytes)
        args = self._args
        row_bytes = self._in_features * self._dtype.itemsize
        args[0:8] = [0, 0, x.data_ptr(), row_bytes, num_rows, chunk, scratch, scratch_bytes]
        for place, out in zip(self._out_fields, outputs, strict=True):
            args[place] = out.data_ptr()
        args[fields.ADDEND] = 0
        if addend is not None:
            if addend.shape != outputs[0].shape or not addend.dtype == x.dtype == self.out_dtype:
                raise ValueError(f"{tuple(addend.shape)} cannot be added to {outputs[0].shape}")
            addend = addend.contiguous()
            args[fields.ADDEND] = addend.data_ptr()
            args[fields.ADDEND_ROW] = addend.shape[-1] * self._dtype.itemsize
        self._kernels.run(self._kernel, self._address, threads)
        return outputs

    @property
    def multiplies_pairs(self) -> bool:
        """Whether products are of bfloat16 that is not widened."""
        return self._dtype == torch.bfloat16 and self._kernels.instructions.dot.of_pairs

    def first_groups(self, num_groups: int) -> "CpuLinear":
        """The same for so many groups of outputs at most, in one layer without a bias."""
        layers = self.layers
        weight = layers.weight[: num_groups * fields.GROUP]
        outputs = len(weight) * fields.PANEL // (2 if layers.gated else 1)
        part = PackedLayers(weight, (None,), layers.in_features, (outputs,), layers.gated)
        return CpuLinear(self._kernels, part, self._dtype, self.out_dtype)

    def use_library(self, library: Library, fewest_rows: int) -> None:
        """Let a library multiply from so many rows of a task on; only ``multiplies_pairs``."""
        if not self.multiplies_pairs:
            return
        self._args[fields.LIBRARY] = library.multiply
        self._args[fields.LIBRARY_RELEASE] = library.release
        self._args[fields.LIBRARY_FEWEST_ROWS] = fewest_rows

    def _scratch_bytes(self, chunk_rows: int) -> int:
        if self._kernel.layout is fields.AMX_LINEAR_LAYOUT:
            return fields.amx_scratch_bytes(chunk_rows)
        quantized = self.layers.form is not None
        return fields.scratch_bytes(chunk_rows, self._in_features, quantized=quantized)

    def _write_constants(self) -> None:
        """Write the arguments that are the same in every call."""
        layers, args = self.layers, self._args
        args[fields.WEIGHT] = layers.weight.data_ptr()
        args[fields.IN_FEATURES] = layers.in_features
        if layers.form is not None:
            form = layers.form
            args[fields.TASK_BYTES] = layers.weight.shape[1]
            args[fields.GROUP_INPUTS : fields.HEADER_BYTES + 1] = [
                form.group_size,
                form.group_bytes,
                form.header_bytes,
            ]
        args[fields.EPILOGUE] = fields.SILU_GATED if layers.gated else fields.PLAIN
        if self.out_dtype != self._dtype:
            args[fields.EPILOGUE] = fields.FLOAT32
        first, at = 0, fields.SEGMENTS
        for groups, out_features, bias in zip(
            layers.groups, layers.out_features, layers.biases, strict=True
        ):
            args[at : at + fields.SEGMENT_FIELDS] = [
                first,
                0,
                out_features * self.out_dtype.itemsize,
                2 * out_features if layers.gated else out_features,
                0 if bias is None else bias.data_ptr(),
            ]
            first += groups
            at += fields.SEGMENT_FIELDS
        args[at] = args[fields.NUM_GROUPS] = first
