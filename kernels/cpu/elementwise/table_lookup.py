"""Lookups of rows in tables and in packed weights on CPUs."""

import ctypes

import torch

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.elementwise.lookup_kernel import lookup_kernel
from kernels.cpu.linear.unpack_kernel import unpack_kernel
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.thread_team import ThreadTeam


class CpuLookups:
    """Lookups by token or position, which a captured graph repeats for other ones."""

    def __init__(self) -> None:
        self._team = ThreadTeam()

    def look_up(
        self,
        layout: ArgumentLayout,  # TOKEN_LOOKUP_LAYOUT or POSITION_LOOKUP_LAYOUT
        table: torch.Tensor,  # [L, ...], contiguous
        indices: torch.Tensor,  # [N] int64, contiguous
        out: torch.Tensor,  # [N, ...], contiguous
    ) -> None:
        """Write the row of each index; NaN for an index that the table does not have.

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
        self._run(lookup_kernel(layout), table, len(table), table[:1].nbytes, indices, out)

    def unpack(
        self,
        layers: PackedLayers,  # one layer
        token_ids: torch.Tensor,  # [N] int64, contiguous
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The row of each token [N, K]; NaN for a token that the layer does not have.

        Raises:
            ValueError: no kernel serves the type.
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
        args = (ctypes.c_int64 * fields.TOKEN_LOOKUP_LAYOUT.num_fields)()
        args[fields.TABLE :] = [
            table.data_ptr(),
            num_rows,
            row_size,
            indices.data_ptr(),
            len(indices),
            out.data_ptr(),
        ]
        self._team.run(kernel, ctypes.addressof(args), 1)
