"""Rows of tables, looked up by compiled code (CPU)."""

import ctypes

import torch

from kernels import cpu_jobs as jobs
from kernels.cpu_compile import lookup_kernel
from kernels.cpu_job_kinds import JobKind
from kernels.cpu_threads import TeamRunner


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
        if indices.dtype != torch.int64:
            raise ValueError(f"indices are {indices.dtype}; expected int64")
        if not (table.is_contiguous() and indices.is_contiguous() and out.is_contiguous()):
            raise ValueError("tables, indices and rows must be contiguous")
        job = (ctypes.c_int64 * jobs.LOOKUP_FIELDS)()
        job[jobs.TABLE] = table.data_ptr()
        job[jobs.TABLE_ROWS] = len(table)
        job[jobs.TABLE_ROW_BYTES] = table[:1].nbytes
        job[jobs.INDICES] = indices.data_ptr()
        job[jobs.NUM_INDICES] = len(indices)
        job[jobs.LOOKED_UP] = out.data_ptr()
        self._team.run(lookup_kernel(kind), ctypes.addressof(job), 1)
