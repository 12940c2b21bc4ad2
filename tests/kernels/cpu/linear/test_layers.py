"""Linear layers on CPUs against torch in float64."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn.functional import linear, silu

from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.weight_packing import PackedLayers, is_narrow, pack, pack_gated
from kernels.cpu.runtime.instruction_set import Dot, Instructions, detect

DTYPES = [torch.float32, torch.bfloat16]
# float32 inputs with weights of either type, and bfloat16.
KINDS = ["float32", "narrow weights", "bfloat16"]

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


def random(*shape: int, kind: str = "float32", seed: int = 0) -> torch.Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "bfloat16":
        return found.bfloat16()
    return found.bfloat16().float() if kind == "narrow weights" else found


def tolerance(dtype: torch.dtype, in_features: int) -> float:
    """Of outputs whose spread is about the root of the number of inputs."""
    rounding = 2.0**-24 * in_features if dtype == torch.float32 else 2.0**-8
    return 4 * rounding * in_features**0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_features", [16, 528, 1040])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 31, 200])
def test_equals_products_in_float64(
    kernels: CpuLayers, threads: None, kind: str, in_features: int, num_rows: int
) -> None:
    weight, bias = random(77, in_features, kind=kind), random(77, kind=kind, seed=1)
    layers = pack([weight], [bias])
    assert layers.weight.dtype == (torch.float32 if kind == "float32" else torch.bfloat16)
    x = random(2, num_rows, in_features, kind=kind, seed=2)
    (out,) = kernels.linear(layers, x.dtype)(x)
    assert out.dtype == x.dtype
    expected = linear(x.double(), weight.double(), bias.double())
    error = (out - expected).abs() / expected.abs().clamp_min(in_features**0.5)
    assert error.max() < tolerance(x.dtype, in_features) / in_features**0.5


@pytest.mark.parametrize("num_rows", [1, 7, 200])
def test_outputs_in_float32_are_those_before_rounding(kernels: CpuLayers, num_rows: int) -> None:
    layers = pack([random(77, 528, kind="bfloat16")], [random(77, kind="bfloat16", seed=1)])
    x = random(num_rows, 528, kind="bfloat16", seed=2)
    (wide,) = kernels.linear(layers, torch.bfloat16, torch.float32)(x)
    (rounded,) = kernels.linear(layers, torch.bfloat16)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), rounded)
    assert not torch.equal(wide, rounded.float())


def test_outputs_of_other_types_are_refused(kernels: CpuLayers) -> None:
    weight = random(80, 96)
    with pytest.raises(ValueError, match=r"inputs of torch.float32 and outputs of torch.bfloat16"):
        kernels.linear(pack([weight]), torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"inputs of torch.bfloat16 and outputs of torch.float32"):
        kernels.linear(pack_gated(weight, weight), torch.bfloat16, torch.float32)
    wide = kernels.linear(pack([weight.bfloat16()]), torch.bfloat16, torch.float32)
    x = random(2, 96, kind="bfloat16")
    with pytest.raises(ValueError, match="cannot be added"):
        wide(x, random(2, 80, kind="bfloat16"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_the_same_alone_and_in_any_batch(
    kernels: CpuLayers, threads: None, kind: str
) -> None:
    layers = [
        pack([random(100, 1040, kind=kind)]),
        pack([random(n, 1040, kind=kind) for n in (48, 20, 64)]),
        pack_gated(random(80, 1040, kind=kind), random(80, 1040, kind=kind, seed=1)),
    ]
    for packed in layers:
        compiled = kernels.linear(packed, torch.bfloat16 if kind == "bfloat16" else torch.float32)
        x = random(200, 1040, kind=kind, seed=2)
        together = compiled(x)
        for size in (1, 2, 3, 4, 5, 6, 7, 16, 64, 97):
            for first in (0, 200 - size):
                parts = compiled(x[first : first + size])
                for whole, part in zip(together, parts, strict=True):
                    assert torch.equal(whole[first : first + size], part)


def test_narrow_weights_give_the_bits_of_wide_ones(kernels: CpuLayers) -> None:
    weight = random(128, 1040, kind="narrow weights")
    narrow = pack([weight])
    panels = weight.view(-1, 16, 1040).permute(0, 2, 1).contiguous()
    wide = PackedLayers(panels, narrow.biases, 1040, (128,), gated=False)
    assert narrow.weight.nbytes * 2 == wide.weight.nbytes
    for num_rows in (1, 50):
        x = random(num_rows, 1040, seed=1)
        outs = [kernels.linear(layers, torch.float32)(x)[0] for layers in (narrow, wide)]
        assert torch.equal(*outs)


def test_layers_that_share_their_input_give_what_each_gives_alone(kernels: CpuLayers) -> None:
    weights = [random(n, 96, seed=n) for n in (64, 33, 130)]
    biases = [random(64), None, random(130)]
    x = random(9, 96, seed=5)
    together = kernels.linear(pack(weights, biases), torch.float32)(x)
    for weight, bias, out in zip(weights, biases, together, strict=True):
        assert torch.equal(kernels.linear(pack([weight], [bias]), torch.float32)(x)[0], out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_gates_are_applied_where_they_belong(
    kernels: CpuLayers, dtype: torch.dtype, biased: bool
) -> None:
    gate, up = (random(112, 96, seed=seed).div(4).to(dtype) for seed in (0, 1))
    biases = (random(112, seed=2).to(dtype), random(112, seed=3).to(dtype)) if biased else None
    x = random(9, 96, seed=4).to(dtype)
    (out,) = kernels.linear(pack_gated(gate, up, biases), dtype)(x)
    first, second = biases or (torch.zeros(112), torch.zeros(112))
    expected = silu(linear(x.double(), gate.double(), first.double()))
    expected = expected * linear(x.double(), up.double(), second.double())
    torch.testing.assert_close(
        out.double(), expected, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 2**-8
    )


def test_gates_far_from_zero_neither_overflow_nor_vanish(kernels: CpuLayers) -> None:
    gate = torch.zeros(16, 16)
    gate[:, 0] = 1.0
    compiled = kernels.linear(pack_gated(gate, gate), torch.float32)
    x = torch.zeros(6, 16)
    x[:, 0] = torch.tensor([-1e4, -90.0, -1e-6, 0.0, 90.0, 1e4])
    expected = silu(x[:, :1].double()) * x[:, :1].double()
    torch.testing.assert_close(
        compiled(x)[0].double(), expected.expand(6, 16), rtol=1e-5, atol=1e-28
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_addend_is_added_before_rounding(kernels: CpuLayers, dtype: torch.dtype) -> None:
    weight, addend = random(77, 64).to(dtype), random(5, 77, seed=1).to(dtype)
    x = random(5, 64, seed=2).to(dtype)
    (out,) = kernels.linear(pack([weight]), dtype)(x, addend)
    expected = linear(x.double(), weight.double()) + addend
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-5)


def test_a_nan_stays_in_its_row(kernels: CpuLayers) -> None:
    x = random(7, 32).bfloat16()
    x[3, 5] = torch.nan
    (out,) = kernels.linear(pack([random(40, 32).bfloat16()]), torch.bfloat16)(x)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_rows_of_packed_weights_can_be_read_back(kept: torch.dtype, dtype: torch.dtype) -> None:
    weight = random(130, 96).to(kept).to(dtype)
    packed = pack([weight])
    assert packed.weight.dtype == kept
    rows = torch.tensor([0, 129, 17, 64, 17, 130, -1])  # the last two are in no row
    found = CpuLookups().unpack(packed, rows, dtype)
    assert torch.equal(found[:5], weight[rows[:5]])
    assert found[5:].isnan().all()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_rows=st.integers(0, 130),
    outputs=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    vectors=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_is_served(
    kernels: CpuLayers, num_rows: int, outputs: list[int], vectors: int, dtype: torch.dtype
) -> None:
    in_features = 16 * vectors
    weights = [random(n, in_features, seed=n).to(dtype) for n in outputs]
    # Not a seed of weights: rows times themselves are larger than the tolerance thinks of.
    x = random(num_rows, in_features, seed=1_000).to(dtype)
    found = kernels.linear(pack(weights), dtype)(x)
    for weight, out in zip(weights, found, strict=True):
        assert out.shape == (num_rows, len(weight))
        expected = linear(x.double(), weight.double())
        assert ((out - expected).abs() < 2 * tolerance(dtype, in_features)).all()


def test_inputs_that_do_not_fit_are_refused(kernels: CpuLayers) -> None:
    compiled = kernels.linear(pack([random(40, 32)]), torch.float32)
    with pytest.raises(ValueError, match=r"48.*expected.*32"):
        compiled(random(2, 48))
    with pytest.raises(ValueError, match=r"bfloat16.*expected.*float32"):
        compiled(random(2, 32).bfloat16())
    with pytest.raises(ValueError, match="cannot be added"):
        compiled(random(2, 32), random(2, 41))
    with pytest.raises(ValueError, match="expected"):
        kernels.rms_norm(torch.ones(32), 1e-6, torch.float32)(random(2, 48))
    with pytest.raises(ValueError, match="not served"):
        kernels.layer_norm(torch.ones(32), torch.ones(48), 1e-6, torch.float32)


def test_weights_are_narrow_where_nothing_is_lost() -> None:
    assert is_narrow(random(4, 16, kind="narrow weights"))
    assert not is_narrow(random(4, 16))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_packed_weights_lie_where_huge_pages_can_be() -> None:
    weight = pack([torch.zeros(1024, 2048, dtype=torch.bfloat16)]).weight
    flags: list[str] = []
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(part, 16) for part in found.groups())
        if line.startswith("VmFlags:") and begin <= weight.data_ptr() < end:
            flags = line.split()[1:]
    assert flags
    assert "sh" not in flags  # shared memory has none by default
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def compile_for(cpu: str, folder: Path) -> str:
    """The assembly of linear layers in bfloat16 for another CPU, in a process of its own."""
    code = """
import sys, torch
from kernels.cpu.runtime.instruction_set import choose
from kernels.cpu.linear.linear_kernel import linear_kernel
instructions = choose({"avx512f", "avx512vl", "avx512bf16"})
kernel = linear_kernel(torch.bfloat16, torch.bfloat16, instructions)
sys.stdout.write(kernel.code._library.get_asm_str())
"""
    features = "+avx2,+fma,+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512bf16"
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(folder),
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def innermost_loops(assembly: str) -> Iterator[str]:
    """What stands between a label and the first jump after it, if that is a jump back to it."""
    label, body = "", list[str]()
    for line in assembly.splitlines():
        if line.startswith(".LBB"):
            label, body = line.partition(":")[0], []
        elif line.startswith("\tj"):
            if label and line.split() == [line.split()[0], label]:
                yield "\n".join(body)
            label = ""
        else:
            body.append(line)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the assembly is x86's")
def test_cpus_with_the_dot_product_get_it_and_keep_sums_in_registers(tmp_path: Path) -> None:
    loops = innermost_loops(compile_for("znver4", tmp_path))
    blocks = [body for body in loops if "vdpbf16ps" in body]
    widths = {body.count("vdpbf16ps") for body in blocks}
    assert {16, 24} <= widths, widths  # register blocks of 8 x 2 (or 4 x 4) and 12 x 2
    for body in blocks:
        assert "%ymm" not in body
        assert "zmm" not in "".join(line for line in body.splitlines() if "(%rsp)" in line)


@pytest.fixture(scope="module")
def emulated() -> CpuLayers:
    """Blocks and pairs as on a CPU with the dot product, which may not be at hand."""
    return CpuLayers(Instructions("emulated", wide=True, dot=Dot.EMULATED))


def test_pairs_are_multiplied_as_by_the_dot_product(emulated: CpuLayers, threads: None) -> None:
    weight, bias = random(77, 1040, kind="bfloat16"), random(77, kind="bfloat16", seed=1)
    compiled = emulated.linear(pack([weight], [bias]), torch.bfloat16)
    x = random(200, 1040, kind="bfloat16", seed=2)
    (out,) = compiled(x)
    expected = linear(x.double(), weight.double(), bias.double())
    error = (out - expected).abs() / expected.abs().clamp_min(1040**0.5)
    assert error.max() < tolerance(x.dtype, 1040) / 1040**0.5
    for size in (1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 24, 25, 64):
        assert torch.equal(compiled(x[:size])[0], out[:size])
        assert torch.equal(compiled(x[-size:])[0], out[-size:])


def test_wide_registers_give_the_bits_of_narrow_ones(
    kernels: CpuLayers, emulated: CpuLayers
) -> None:
    layers = pack([random(100, 1040, kind="narrow weights")])
    for num_rows in (1, 3, 8, 30):
        x = random(num_rows, 1040, seed=1)
        outs = [each.linear(layers, torch.float32)(x)[0] for each in (kernels, emulated)]
        assert torch.equal(*outs)


START = """
import torch
from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.elementwise.norm_kernel import norm_kernel
from kernels.cpu.linear.linear_kernel import linear_kernel
kernel = linear_kernel(torch.bfloat16, torch.bfloat16, detect())
print(kernel.from_cache, norm_kernel(torch.bfloat16).from_cache)
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", START],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs == [["False", "False"], ["True", "True"]]
