"""Rows of tables, looked up by compiled code (CPU)."""

import ctypes

import torch

from kernels.cpu.linear.entry_points import unpack_kernel
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.runtime import kernel_arguments as jobs
from kernels.cpu.runtime.entry_points import Kernel, lookup_kernel
from kernels.cpu.runtime.kernel_kinds import JobKind
from kernels.cpu.runtime.thread_team import TeamRunner


class CpuLookups:
    """Lookups that a tape repeats for other tokens and positions."""

    def __init__(self) -> None:
        self._team = TeamRunner()

    def look_up(
        self,
        kind: JobKind,  # by what a tape looks up
        table: torch.Tensor,  # [L, ...], contiguous
        indices: torch.Tensor,  # [N] int64, contiguous
        out: torch.Tensor,  # [N, ...], contiguous
    ) -> None:
        """Write the row of each index; one that the table does not have becomes all NaN.

        Raises:
            ValueError: shapes or types do not fit each other, or something is not contiguous.
        """
        if out.shape != (len(indices), *table.shape[1:]) or out.dtype != table.dtype:
            raise ValueError(
                f"{out.dtype} {tuple(out.shape)} cannot hold {len(indices)} rows of "
                f"{table.dtype} {tuple(table.shape)}"
            )
        if not table.is_contiguous():
            raise ValueError("tables must be contiguous")
        self._run(lookup_kernel(kind), table, len(table), table[:1].nbytes, indices, out)

    def unpack(
        self,
        layers: PackedLayers,  # one layer
        token_ids: torch.Tensor,  # [N] int64, contiguous
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The row of each token [N, K]; one that the layer does not have becomes all NaN.

        Raises:
            ValueError: there is no kernel for the type.
        """
        (num_rows,), num_features = layers.out_features, layers.in_features
        out = torch.empty((len(token_ids), num_features), dtype=dtype)
        kernel = unpack_kernel(layers.weight.dtype, dtype)
        self._run(kernel, layers.weight, num_rows, num_features, token_ids, out)
        return out

    def _run(
        self,
        kernel: Kernel,
        table: torch.Tensor,
        num_rows: int,
        row_size: int,
        indices: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if indices.dtype != torch.int64:
            raise ValueError(f"indices are {indices.dtype}; expected int64")
        if not (indices.is_contiguous() and out.is_contiguous()):
            raise ValueError("indices and rows must be contiguous")
        job = (ctypes.c_int64 * jobs.LOOKUP_FIELDS)()
        job[jobs.TABLE : jobs.LOOKUP_FIELDS] = [
            table.data_ptr(),
            num_rows,
            row_size,
            indices.data_ptr(),
            len(indices),
            out.data_ptr(),
        ]
        self._team.run(kernel, ctypes.addressof(job), 1)
