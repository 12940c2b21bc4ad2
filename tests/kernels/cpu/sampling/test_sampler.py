"""Sampling on threads, against the definition in float64 and torch's Gumbel noise."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.sampling.gumbel import row_keys
from kernels.cpu.sampling.sample_arguments import SAMPLE_PARAMETERS
from kernels.cpu.sampling.sampler import CpuSampler
from tests.gpu_worker.sampling.torch_sampler import gumbel


@dataclass(frozen=True)
class Samples:
    """Arguments of the sampler, for all rows of some logits or for some."""

    logits: torch.Tensor
    rows: np.ndarray
    keys: np.ndarray
    parameters: dict[str, np.ndarray]

    @staticmethod
    def of(logits: torch.Tensor, seed: int = 0, **same: float) -> "Samples":
        num = len(logits)
        values = {"temperature": 1.0, **same}
        made = {
            each.name: np.full(num, values.get(each.name, each.neutral), each.column)
            for each in SAMPLE_PARAMETERS
        }
        seeds = np.full(num, seed, np.uint64)
        keys = row_keys(seeds, np.zeros(num, np.int64), np.arange(num))
        return Samples(logits, np.arange(num), np.ascontiguousarray(keys), made)

    def tokens(self) -> np.ndarray:
        """Sampled from the rows, beside the argmax of the others."""
        found = self.logits.float().numpy().argmax(1)
        CpuSampler().sample(self.logits, self.rows, self.parameters, self.keys, found)
        return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def expected(samples: Samples) -> torch.Tensor:
    """By the definition, without filters; in float64, so that ties are no question."""
    scaled = (
        samples.logits.double()
        / torch.from_numpy(samples.parameters["temperature"])[:, None].double()
    )
    return (scaled + gumbel(torch.from_numpy(samples.keys), scaled.shape[1])).argmax(1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("size", [1, 5, 16, 31, 33, 5003])
def test_a_sample_is_the_gumbel_argmax(threads: None, size: int, temperature: float) -> None:
    samples = Samples.of(random(200, size), seed=size, temperature=temperature)
    found = torch.from_numpy(samples.tokens())
    # Two scores that are all but equal may change places.
    assert (found != expected(samples)).sum() <= 1


def test_equal_logits_are_sampled_equally_often() -> None:
    counts = np.bincount(Samples.of(torch.full((20_000, 21), 5.0)).tokens(), minlength=21)
    assert counts.min() > 20_000 / 21 * 0.85


def test_bfloat16_gives_the_samples_of_its_float32() -> None:
    logits = random(64, 4099).bfloat16()
    for filters in ({}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.05, "top_p": 0.99}):
        samples = Samples.of(logits, temperature=1.7, **filters)
        wide = replace(samples, logits=logits.float())
        assert np.array_equal(samples.tokens(), wide.tokens())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 12),
    size=st.integers(1, 300),
    temperature=st.floats(2.0**-6, 8.0, width=32),
    top_k=st.integers(0, 310),
    top_p=st.floats(2.0**-9, 1.0, width=32),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    levels=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_only_what_filters_keep_is_sampled(
    seed: int,
    num_rows: int,
    size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    levels: float,
) -> None:
    """Also where many logits are equal: those are kept or rejected together."""
    logits = random(num_rows, size, seed=seed)
    if levels:
        logits = (logits / levels).round() * levels
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = torch.from_numpy(Samples.of(logits, seed, **filters).tokens())
    scaled = logits.double() / np.float32(temperature)
    values = scaled.sort(1, descending=True).values
    sampled = scaled.gather(1, tokens[:, None])
    if top_k:
        assert (sampled >= values[:, [min(top_k, size) - 1]]).all()
        values = torch.where(torch.arange(size) < top_k, values, -torch.inf)
    if min_p:
        assert (sampled >= scaled.amax(1, keepdim=True) + np.log(min_p) - 1e-4).all()
    likelier = torch.where(values > sampled, values.softmax(1), 0.0).sum(1)
    assert (likelier < top_p + 1e-4).all()


def test_other_rows_keep_their_token() -> None:
    logits = random(30, 1000)
    every_row = Samples.of(logits, temperature=2.0)
    sampled = every_row.tokens()
    some = np.array([3, 4, 17, 29])
    others = np.setdiff1d(np.arange(30), some)
    samples = Samples(
        logits,
        some,
        np.ascontiguousarray(every_row.keys[:, some]),
        {name: values[some] for name, values in every_row.parameters.items()},
    )
    found = samples.tokens()
    assert np.array_equal(found[some], sampled[some])
    assert np.array_equal(found[others], logits.numpy().argmax(1)[others])


def test_rows_may_lie_apart(threads: None) -> None:
    logits = random(40, 2 * 700)
    apart = replace(Samples.of(logits), logits=logits[:, :700])
    together = replace(apart, logits=logits[:, :700].contiguous())
    assert np.array_equal(apart.tokens(), together.tokens())


def test_logits_of_minus_infinity_are_never_sampled() -> None:
    logits = random(3000, 70)
    banned = torch.arange(70) % 3 == 1
    logits[:, banned] = -torch.inf
    for filters in ({}, {"top_k": 60}, {"top_p": 0.9999}):
        assert not banned[Samples.of(logits, temperature=9.0, **filters).tokens()].any()


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_change_no_others(special: float) -> None:
    logits = random(50, 333)
    broken = logits.clone()
    broken[::5, 7:] = special
    broken[5] = special
    for filters in ({}, {"top_k": 4, "top_p": 0.8, "min_p": 0.1}):
        right, found = (Samples.of(each, **filters).tokens() for each in (logits, broken))
        kept = np.arange(50) % 5 != 0
        assert np.array_equal(right[kept], found[kept])
        assert ((found >= 0) & (found < 333)).all()


def test_no_row_may_be_sampled() -> None:
    logits = random(2, 10)
    none = Samples.of(logits[:0])
    assert np.array_equal(replace(none, logits=logits).tokens(), logits.numpy().argmax(1))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", np.ones(3, np.float64)),
        ("top_k", np.zeros(4, np.int64)),
        ("top_p", np.ones(6, np.float32)[::2]),
        ("min_p", np.zeros((3, 1), np.float32)),
        ("keys", np.zeros((3, 2), np.int32)),
    ],
)
def test_what_does_not_fit_is_refused(name: str, wrong: np.ndarray) -> None:
    samples = Samples.of(random(3, 10))
    if name in samples.parameters:
        samples = replace(samples, parameters=samples.parameters | {name: wrong})
    else:
        samples = replace(samples, **{name: wrong})
    with pytest.raises(ValueError, match=rf"^{name} .* expected \(.*3.*contiguous"):
        samples.tokens()


def test_logits_of_other_types_and_strides_are_refused() -> None:
    samples = Samples.of(random(3, 10))
    with pytest.raises(ValueError, match="float64"):
        replace(samples, logits=samples.logits.double()).tokens()
    with pytest.raises(ValueError, match="strides"):
        replace(samples, logits=random(10, 3).T).tokens()
