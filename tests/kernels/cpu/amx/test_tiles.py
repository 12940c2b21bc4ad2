"""The emulated tiles against Intel's definition of the instructions, in numpy."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import cfunc, njit, types

from kernels.cpu.amx import tiles
from kernels.cpu.runtime.bf16_dot import emulated_amx_tag
from kernels.cpu.runtime.instruction_set import detect

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

Run = Callable[[int, int, int, int, int, int], None]
F32 = npt.NDArray[np.float32]


@njit
def _multiply(state, sums, rows, weights, num_rows, num_configured):
    tag = emulated_amx_tag
    tiles.configure(tag, state, num_configured, 1)
    tiles.clear(tag, state, 0)
    tiles.load(tag, state, 1, sums, tiles.ROW_BYTES)
    tiles.load(tag, state, 4, rows, tiles.ROW_BYTES)
    tiles.load(tag, state, 5, weights, tiles.ROW_BYTES)
    tiles.multiply(tag, state, 0, 4, 5)
    tiles.multiply(tag, state, 1, 4, 5)
    tiles.store(tag, state, 1, sums, tiles.ROW_BYTES)
    if num_rows != num_configured:  # tile 5 has sixteen rows, and no sums have as many
        tiles.multiply(tag, state, 1, 5, 5)
        tiles.store(tag, state, 1, sums, tiles.ROW_BYTES)
    tiles.release(tag, state)
    tiles.store(tag, state, 0, sums, tiles.ROW_BYTES)  # of no rows


@pytest.fixture(scope="module")
def multiply() -> Run:
    """One product of tiles, called with addresses."""
    compiled = cfunc(types.void(*(types.int64,) * 6))(_multiply.py_func)
    run: Run = compiled.ctypes
    return run


def by_definition(sums: F32, x: torch.Tensor, w: torch.Tensor) -> F32:
    """TDPBF16PS: a product of two bfloat16 is exact in float32, so an addition rounds once."""
    rows, weights = x.float().numpy(), w.float().numpy()  # [R, 32], [16, 16, 2]
    halves = np.zeros((2, len(rows), 16), np.float32)
    for pair in range(16):
        for half in (0, 1):
            halves[half] += rows[:, 2 * pair + half, None] * weights[None, pair, :, half]
    return sums + (halves[0] + halves[1])


def operands(num_rows: int) -> tuple[F32, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    sums = torch.randn(16, 16, generator=generator)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    w = torch.randn(16, 16, 2, generator=generator).bfloat16()
    return sums.numpy(), x, w


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16])
def test_products_of_tiles_have_the_bits_of_their_definition(multiply: Run, num_rows: int) -> None:
    sums, x, w = operands(num_rows)
    expected = sums.copy()
    expected[:num_rows] = by_definition(sums[:num_rows], x[:num_rows], w)
    state = np.full(tiles.STATE_BYTES, 255, np.uint8)
    multiply(state.ctypes.data, sums.ctypes.data, x.data_ptr(), w.data_ptr(), num_rows, num_rows)
    assert np.array_equal(sums, expected)


def test_tiles_that_do_not_fit_each_other_give_nan(multiply: Run) -> None:
    sums, x, w = operands(5)
    before = sums.copy()
    state = np.zeros(tiles.STATE_BYTES, np.uint8)
    multiply(state.ctypes.data, sums.ctypes.data, x.data_ptr(), w.data_ptr(), 16, 5)
    assert np.isnan(sums[:5]).all()
    assert np.array_equal(sums[5:], before[5:])
