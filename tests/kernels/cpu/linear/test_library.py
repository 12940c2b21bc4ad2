"""A library that multiplies for linear layers, and the trial that decides about it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numba import cfunc, njit, types

from kernels.cpu.linear.layers import CpuLayers, CpuLinear
from kernels.cpu.linear.library_blocks import Library, find_library
from kernels.cpu.linear.library_trial import LibraryTrial
from kernels.cpu.linear.weight_packing import pack, pack_gated
from kernels.cpu.runtime.captured_graph import CapturedGraph, GraphCapture
from kernels.cpu.runtime.instruction_set import EMULATED, Instructions, choose, detect
from kernels.cpu.runtime.memory import claim, load_element, store_element
from kernels.cpu.runtime.simd import bfloat16_tag, float32_tag
from kernels.cpu.runtime.thread_team import capturing
from kernels.interface import RaggedBatch

CALLS = np.zeros(2, np.int64)  # of multiply and of release
CALLS_AT = CALLS.ctypes.data

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


@njit
def _dot(x, w, inputs, step):
    """One output of sixteen, in the order of a kernel that sums ``step`` inputs at a time."""
    total = types.float32(0.0)
    for begin in range(0, inputs, step):
        odd = even = types.float32(0.0)
        for k in range(begin, min(begin + step, inputs), 2):
            for half in (1, 0):
                a = load_element(bfloat16_tag, x + 2 * (k + half))
                b = load_element(bfloat16_tag, w + 32 * k + 2 * half)
                if step == 2:
                    total += a * b
                elif half == 1:
                    odd += a * b
                else:
                    even += a * b
        total += even + odd
    return total


def _multiplier(step: int, error: float) -> Callable[..., None]:
    def multiply(rows, outputs, inputs, x_row, w_row, out_row, _, x, w, out, __):
        claim(CALLS_AT)
        for r in range(rows):
            for n in range(outputs):
                total = _dot(x + 2 * r * x_row, w + 4 * n, inputs, step)
                at = out + 4 * (r * out_row + n)
                store_element(float32_tag, at, total + types.float32(error))

    return multiply


def _release(_):
    claim(CALLS_AT + 8)


Make = Callable[..., Library]


@pytest.fixture(scope="module")
def make_library() -> Make:
    """Libraries whose sums have an order and an error."""
    code = []

    def make(step: int, error: float = 0.0) -> Library:
        multiply = cfunc(types.void(*(types.int64,) * 11))(_multiplier(step, error))
        release = cfunc(types.void(types.int64))(_release)
        code.extend((multiply, release))
        return Library(multiply.address, release.address)

    return make


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS[:] = 0


class Clock:
    """A trial's clock: measurements take the scripted seconds, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self._steps = iter([0.0, *(step for each in seconds for step in (0.0, each)), 0.0])
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += next(self._steps)
        return self._now_s


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(instructions: Instructions, inputs: int = 48) -> CpuLinear:
    return CpuLayers(instructions).linear(pack([random(77, inputs)], [random(77)]), torch.bfloat16)


# Seconds of three turns with 32 rows and with 96, ours and then the library's.
FASTER = (2.0,) * 6 + (1.0,) * 6
SLOWER = (1.0,) * 6 + (2.0,) * 6
FASTER_WITH_MANY_ROWS = (2.0,) * 6 + (1.95,) * 3 + (1.0,) * 3
SLOWER_WITH_MANY_ROWS = (2.0,) * 6 + (1.0,) * 3 + (2.0,) * 3


@pytest.mark.parametrize(
    ("seconds", "fewest_rows"),
    [(FASTER, 32), (SLOWER, None), (FASTER_WITH_MANY_ROWS, 96), (SLOWER_WITH_MANY_ROWS, None)],
)
@pytest.mark.parametrize(("emulated", "step"), [("avx512_bf16", 2), ("amx", 32)])
def test_the_faster_one_multiplies_from_the_rows_on_where_it_is_faster(
    make_library: Make,
    seconds: tuple[float, ...],
    fewest_rows: int | None,
    emulated: str,
    step: int,
) -> None:
    linear, x = layer(EMULATED[emulated]), random(200, 48, seed=1)
    expected = linear(x)[0]
    found = LibraryTrial(make_library(step), clock=Clock(*seconds)).choose(linear)
    assert found is not None
    assert found.fewest_rows == fewest_rows
    assert found.ours_ms == (1e3 * seconds[0], 1e3 * seconds[3])
    for num_rows in (1, 31, 32, 33, 64, 95, 96, 97, 131, 200):
        CALLS[:] = 0
        assert torch.equal(linear(x[:num_rows])[0], expected[:num_rows])
        called = fewest_rows is not None and num_rows >= fewest_rows
        assert (CALLS > 0).tolist() == [called, called], num_rows


@pytest.mark.parametrize(("emulated", "step"), [("avx512_bf16", 2), ("amx", 32)])
def test_the_library_multiplies_in_a_captured_graph_too(
    make_library: Make, emulated: str, step: int
) -> None:
    linear, x = layer(EMULATED[emulated]), random(250, 48, seed=1)
    expected = linear(x)[0]
    linear.use_library(make_library(step), 32)
    capture = GraphCapture()
    with capturing(capture):
        (out,) = linear(x)
    graph = CapturedGraph(capture.ops, num_tokens=250)
    for num_tokens, calls in ((250, True), (31, False), (1, False), (70, True)):
        CALLS[:] = 0
        out.fill_(torch.nan)
        graph.replay(num_tokens, batch_of(num_tokens))
        assert torch.equal(out[:num_tokens], expected[:num_tokens])
        assert out[num_tokens:].isnan().all()
        assert bool(CALLS[0]) == calls


def batch_of(num_tokens: int) -> RaggedBatch:
    """One row for each of so many sequences, which have no slots."""
    return RaggedBatch(
        slot_mapping=torch.full((num_tokens,), -1),
        block_tables=torch.zeros(num_tokens, 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        max_query_len=1,
        max_context_len=1,
    )


def test_a_library_with_other_bits_never_multiplies(make_library: Make) -> None:
    linear, x = layer(EMULATED["avx512_bf16"]), random(100, 48, seed=1)
    expected = linear(x)[0]
    found = LibraryTrial(make_library(2, error=1e-3)).choose(linear)
    assert found is not None
    assert (found.fewest_rows, found.because) == (None, "the library's bits differ")
    assert torch.equal(linear(x)[0], expected)


def test_shapes_are_tried_once_and_not_after_the_time_is_used_up(
    make_library: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trial = LibraryTrial(make_library(2), budget_s=5.0, clock=Clock(*FASTER, 0.0))
    kernels = CpuLayers(EMULATED["avx512_bf16"], trial)
    for _ in range(3):
        kernels.linear(pack([random(64, 48)]), torch.bfloat16)
    kernels.linear(pack([random(64, 96)]), torch.bfloat16)
    first, second = (record.fields for record in caplog.records)
    assert first == {
        "inputs": 48,
        "outputs": 64,
        "chosen": "library from 32 rows",
        "because": "it is faster, with the same bits",
        "rows": "32,96",
        "ours_ms": "2000.000,2000.000",
        "library_ms": "1000.000,1000.000",
    }
    assert (second["chosen"], second["because"]) == ("ours", "the time for trials was used up")


def test_nothing_is_tried_where_no_pairs_are_multiplied(make_library: Make) -> None:
    trial = LibraryTrial(make_library(2))
    emulated = CpuLayers(EMULATED["avx512_bf16"])
    assert trial.choose(emulated.linear(pack([random(64, 48).float()]), torch.float32)) is None
    assert LibraryTrial(None).choose(layer(EMULATED["amx"])) is None


def test_torch_has_the_library_only_where_it_serves_the_cpu() -> None:
    avx512_bf16 = choose({"avx512f", "avx512vl", "avx512bf16"})
    assert avx512_bf16 is not None
    assert find_library(avx512_bf16, {"ONEDNN_MAX_CPU_ISA": "AVX2"}) is None
    avx512 = choose({"avx512f"})
    assert avx512 is not None
    assert find_library(avx512) is None
    assert find_library(EMULATED["amx"]) is None


@pytest.mark.parametrize("inputs", [48, 528, 768])
def test_torchs_library_has_the_bits_of_our_kernels(inputs: int) -> None:
    instructions = detect()
    assert instructions is not None
    library = find_library(instructions)
    if library is None:
        pytest.skip("torch has none for this CPU")
    kernels = CpuLayers(instructions)
    for packed in (
        pack([random(70, inputs), random(33, inputs, seed=1)], [None, random(33)]),
        pack_gated(random(80, inputs), random(80, inputs, seed=1)),
    ):
        linear, x = kernels.linear(packed, torch.bfloat16), random(200, inputs, seed=2)
        expected = linear(x)
        linear.use_library(library, 1)
        for num_rows in (32, 40, 96, 200):
            for out, whole in zip(linear(x[:num_rows]), expected, strict=True):
                assert torch.equal(out, whole[:num_rows])
