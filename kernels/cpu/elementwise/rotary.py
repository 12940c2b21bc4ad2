"""Rotary position embeddings on CPUs: checks a call and runs the kernel."""

import ctypes

import torch

from kernels.checks import check_rotary
from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.elementwise.rotary_kernel import rotary_kernel
from kernels.cpu.runtime.thread_team import ThreadTeam

# Less is left to the calling thread: waking the others would take longer.
_SERIAL_ELEMENTS = 64 * 1024


class CpuRotary:
    """Rotary embeddings of queries and keys: x * cos + (-right, left) * sin.

    Left and right are the halves of a head, or of its first Dr elements (RoFormer, in the order of
    GPT-NeoX).

    Args:
        team: runs the kernel.
        dtype: of all inputs and outputs.
    """

    def __init__(self, team: ThreadTeam, dtype: torch.dtype) -> None:
        self._team = team
        self._kernel = rotary_kernel(dtype)
        self._dtype = dtype
        self._args = (ctypes.c_int64 * fields.ROTARY_LAYOUT.num_fields)()
        self._address = ctypes.addressof(self._args)

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
        self._args[0:2] = [0, 0]
        for at, x, out in ((fields.QUERY, query, query_out), (fields.KEY, key, key_out)):
            token, head, _ = x.stride()
            self._args[at : at + 4] = [x.data_ptr(), token * size, head * size, out.data_ptr()]
        self._args[fields.COS :] = [
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
        threads = 1 if serial else self._team.num_threads()
        self._team.run(self._kernel, self._address, threads)
        return query_out, key_out
