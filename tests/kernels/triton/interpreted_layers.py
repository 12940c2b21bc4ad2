"""The Triton kernels around attention, in Triton's interpreter; see tests/support."""

import pytest
import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from kernels.interface import INT8
from kernels.triton import layers
from kernels.triton.backend import TritonBackend
from tests.kernels.cases import Shape, empty_cache

# Of the spread: float32 is summed in another order, bf16 is cut off by the interpreter.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As close as one rounding of the exact result allows."""
    assert found.shape == expected.shape
    difference = (found.double() - expected).abs()
    assert (difference <= TOLERANCE[found.dtype] * (expected.abs() + 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 80), (40,), (1, 4, 3, 96), (1, 0, 64)])
def test_rows_are_normalized(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, factor = random(*shape, dtype=dtype), random(shape[-1], seed=1)
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor.double()
    assert_equal(layers.rms_norm(x, factor, 1e-5), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 80), (40,), (1, 0, 64)])
def test_sums_are_stored_and_normalized(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = (*shape[:-1], shape[-1] + 24)  # inside of longer rows
    joined = random(2, *size, dtype=dtype)
    joined[..., shape[-1] :] = torch.nan
    x, residual = joined[..., : shape[-1]]
    factor = random(shape[-1], seed=1)
    total, found = layers.add_rms_norm(x, residual, factor, 1e-5)
    assert_equal(total, x.double() + residual.double())
    torch.testing.assert_close(found, layers.rms_norm(total, factor, 1e-5))


def test_heads_inside_longer_rows_are_normalized_in_place_of_copies() -> None:
    row = random(1, 6, 200)
    row[..., :8] = row[..., 104:] = torch.nan
    heads = row[..., 8:104].view(1, 6, 3, 32)
    found = layers.rms_norm(heads, torch.ones(32), 1e-6)
    assert_equal(found, torch.nn.functional.rms_norm(heads.double(), (32,), eps=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, layers.GATE_TILE + 8])
def test_gates_are_applied(width: int, dtype: torch.dtype) -> None:
    gate_up = random(2, 3, 2 * width, dtype=dtype) * 3
    gate_up[0, 0, :2] = torch.tensor([-200.0, 200.0])  # an exponential overflows, or vanishes
    gate, up = gate_up.double().split(width, -1)
    assert_equal(layers.silu_gate(gate_up), silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.double().chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return x.double() * cos.double()[:, None] + turned * sin.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (11, 1, 80)])
def test_queries_and_keys_are_turned(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    joined = random(7, (num_heads + num_kv_heads + 1) * head_dim, dtype=dtype)
    joined[:, -head_dim:] = torch.nan  # values, which are not its affair
    heads = joined.view(7, -1, head_dim)
    query, key = heads[:, :num_heads], heads[:, num_heads:-1]
    cos, sin = random(2, 7, head_dim, dtype=dtype, seed=1)  # halves differ
    found_query, found_key = layers.rotate(query, key, cos, sin)
    assert_equal(found_query, rotated(query, cos, sin))
    assert_equal(found_key, rotated(key, cos, sin))
    empty, _ = layers.rotate(query[:0], key[:0], cos[:0], sin[:0])
    assert empty.shape == (0, num_heads, head_dim)


FP16 = torch.float16
WRITES = {
    "own_type": Shape((), num_heads=11, dtype=torch.bfloat16),
    "padded_heads": Shape((), num_heads=3, num_kv_heads=9, head_dim=80, layout="token_major"),
    "narrower": Shape((), cache_dtype=torch.bfloat16, head_dim=24, layout="block_major"),
    "8_bit_floats": Shape((), dtype=FP16, scales=(0.5, 0.0625), head_dim=24),
    "int8": Shape((), dtype=FP16, cache_dtype=INT8, head_dim=24, layout="token_major"),
}


@pytest.mark.parametrize("name", WRITES)
def test_turned_keys_are_stored_as_by_two_launches_in_exactly_the_mapped_slots(name: str) -> None:
    shape = WRITES[name]
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    joined = random(21, (num_heads + 2 * num_kv_heads) * head_dim + 16, dtype=shape.dtype)
    joined[:, -16:] = torch.nan
    joined[3, -40:-16] = 9000.0  # saturates
    heads = joined[:, :-16].unflatten(1, (-1, head_dim))
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    cos, sin = random(2, 21, head_dim, dtype=shape.dtype, seed=1)
    slots = torch.randperm(4 * shape.block_size)[:21]
    slots[4] = -1  # padding
    expected, cache = empty_cache(shape, 4), empty_cache(shape, 4)  # of NaN
    backend = TritonBackend()
    turned_query, turned_key = layers.rotate(query, key, cos, sin)
    backend.write_kv(turned_key, value, expected, slots)
    found = backend.rotate_and_write_kv(query, key, value, cos, sin, cache, slots)
    assert torch.equal(found, turned_query)
    for ours, theirs in zip(cache.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
    none = slice(0, 0)
    empty = backend.rotate_and_write_kv(
        query[none], key[none], value[none], cos[none], sin[none], cache, slots[none]
    )
    assert len(empty) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 70), (67, 96, 24), (0, 8, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_layers_of_independent_rows(
    rows: int, inputs: int, outputs: int, transposed: bool, dtype: torch.dtype
) -> None:
    x = random(1, rows, inputs + 5, dtype=dtype)[..., :inputs]
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    if transposed:
        weight = weight.T.contiguous().T
    bias = random(outputs, dtype=dtype, seed=2) if transposed else None
    exact = torch_linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = layers.linear(x, weight, bias)
    assert_equal(found / inputs**0.5, exact / inputs**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rows_bits_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = random(70, 200, dtype=dtype), random(50, 200, dtype=dtype, seed=1)
    whole = layers.linear(x, weight, None)
    # Rows stay where they are in their tiles: NumPy's product rounds by that, a GPU's does not.
    for rows in (slice(0, 1), slice(0, 40), slice(64, 65), slice(64, 70)):
        assert torch.equal(layers.linear(x[rows], weight, None), whole[rows])


def test_what_does_not_fit_is_refused() -> None:
    x = random(2, 8)
    with pytest.raises(ValueError, match="factor"):
        layers.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"float64 is not served"):
        layers.rms_norm(x.double(), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        layers.add_rms_norm(x, x.half(), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="no halves"):
        layers.silu_gate(x[:, :7])
    with pytest.raises(ValueError, match="weight"):
        layers.linear(x, random(4, 7), None)
    heads = random(2, 3, 8)
    with pytest.raises(ValueError, match="cos"):
        layers.rotate(heads, heads, x[:1], x)
    with pytest.raises(ValueError, match="do not fit"):
        layers.rotate(heads, heads.half(), x, x)
    cache, slots = empty_cache(Shape((), num_kv_heads=3, head_dim=8), 1), torch.arange(2)
    half = x[:, :4]
    with pytest.raises(ValueError, match="all of D 8"):
        TritonBackend().rotate_and_write_kv(heads, heads, heads, half, half, cache, slots)
