"""Samples: their distribution, their filters, and that they depend on nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.sampling import cpu_argmax
from gpu_worker.sampling.gumbel import row_keys
from gpu_worker.sampling.sampler import RowSampling, choose, gumbel_keys
from gpu_worker.step.executor import Executor
from shared.sampling import LOWEST_TEMPERATURE, PARAMETERS, Effect
from tests.gpu_worker.conftest import prompt
from tests.gpu_worker.planner import Planner, sampling
from tests.gpu_worker.sampling.torch_sampler import Filters, gumbel
from tests.gpu_worker.sampling.torch_sampler import sample as torch_sample

V = 40


@dataclass(frozen=True)
class Kind:
    """Sampling parameters of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


def rows_of(kinds: Sequence[Kind]) -> RowSampling:
    """One row of each kind."""
    random_rows = np.flatnonzero([kind.temperature > 0 for kind in kinds])
    random_kinds = [kinds[row] for row in random_rows]
    parameters = {
        name: np.array([getattr(kind, name) for kind in random_kinds], parameter.column)
        for name, parameter in PARAMETERS.items()
        if parameter.effect is Effect.SAMPLE
    }
    return RowSampling(
        random_rows=random_rows,
        seeds=np.array([kind.seed for kind in random_kinds], np.uint64),
        choices=np.array([kind.choice for kind in random_kinds], np.int64),
        parameters=parameters,
        on_device=None,
        has_min_tokens=False,
        logprob_rows=np.empty(0, np.int64),
    )


def rows(num: int, **parameters: Any) -> RowSampling:
    """The same parameters in every row."""
    return rows_of([Kind(**parameters)] * num)


@dataclass(frozen=True)
class Sample:
    """Tokens [R], and the rows that were broken."""

    tokens: np.ndarray
    broken: np.ndarray


def sample(logits: torch.Tensor, rows: RowSampling, positions: np.ndarray) -> Sample:
    """Tokens that are chosen at these positions."""
    keys = gumbel_keys(rows, positions)
    found = choose(logits, rows, keys, torch.from_numpy(keys))
    return Sample(found.tokens.numpy(), found.broken.numpy().nonzero()[0])


def counts_of(logits: torch.Tensor, num: int, **parameters: Any) -> np.ndarray:
    """How often each token is sampled from the same logits [V] at ``num`` positions."""
    tokens = sample(logits.repeat(num, 1), rows(num, **parameters), np.arange(num)).tokens
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: np.ndarray, probabilities: torch.Tensor) -> float:
    """Excess of the chi-square statistic, in its standard deviations."""
    expected = probabilities.double().numpy() * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a token of probability 0 was sampled"
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(3)) * 1.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 12345, 2**63 - 1])
def test_samples_follow_softmax(logits: torch.Tensor, temperature: float, seed: int) -> None:
    counts = counts_of(logits, 60_000, temperature=temperature, seed=seed)
    assert abs(chi_square(counts, (logits / temperature).softmax(0))) < 4


def test_samples_of_one_position_follow_softmax_over_seeds(logits: torch.Tensor) -> None:
    num = 60_000
    parameters = replace(rows(num), seeds=np.arange(num, dtype=np.uint64))
    tokens = sample(logits.repeat(num, 1), parameters, np.full(num, 17)).tokens
    assert abs(chi_square(np.bincount(tokens, minlength=V), logits.softmax(0))) < 4


def test_choices_are_sampled_independently(logits: torch.Tensor) -> None:
    num = 20_000
    first, second = (
        sample(logits.repeat(num, 1), rows(num, choice=choice), np.arange(num)).tokens
        for choice in (0, 1)
    )
    same = (logits.softmax(0) ** 2).sum().item()
    assert (first == second).mean() == pytest.approx(same, abs=0.015)


def test_neighbours_in_position_are_uncorrelated() -> None:
    keys = row_keys(np.zeros(2000, np.uint64), np.zeros(2000, np.int64), np.arange(2000))
    noise = gumbel(torch.from_numpy(keys), 500).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)
    centred = noise - noise.mean()
    for other in (centred[1:, :] * centred[:-1, :], centred[:, 1:] * centred[:, :-1]):
        assert abs(other.mean().item()) < 0.01


def kept(counts: np.ndarray) -> set[int]:
    return set(np.flatnonzero(counts).tolist())


def test_top_k_keeps_the_k_largest(logits: torch.Tensor) -> None:
    for k in (1, 2, 7):
        counts = counts_of(logits, 20_000, temperature=3.0, top_k=k)
        best = logits.topk(k).indices
        assert kept(counts) == set(best.tolist())
        probabilities = torch.zeros(V).scatter(0, best, (logits[best] / 3).softmax(0))
        if k > 1:
            assert abs(chi_square(counts, probabilities)) < 4
    assert len(kept(counts_of(logits, 20_000, temperature=50.0, top_k=V + 5))) == V


def nucleus(probabilities: torch.Tensor, top_p: float) -> set[int]:
    """The smallest set of most likely tokens that holds at least ``top_p``."""
    order = probabilities.argsort(descending=True).tolist()
    found: set[int] = set()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            break
        found.add(token)
        mass += probabilities[token].item()
    return found


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.8, 0.95])
def test_top_p_keeps_the_nucleus(logits: torch.Tensor, top_p: float) -> None:
    counts = counts_of(logits, 40_000, temperature=1.5, top_p=top_p)
    assert kept(counts) == nucleus((logits / 1.5).softmax(0), top_p)


def test_top_p_counts_the_mass_that_top_k_left(logits: torch.Tensor) -> None:
    counts = counts_of(logits, 40_000, top_k=6, top_p=0.7)
    best = logits.topk(6).indices
    probabilities = torch.zeros(V).scatter(0, best, logits[best].softmax(0))
    assert kept(counts) == nucleus(probabilities, 0.7)


def test_min_p_keeps_what_is_near_the_most_likely(logits: torch.Tensor) -> None:
    counts = counts_of(logits, 40_000, min_p=0.2)
    probabilities = logits.softmax(0)
    near = probabilities >= 0.2 * probabilities.max()
    assert kept(counts) == set(near.nonzero().squeeze(1).tolist())


def test_a_wide_nucleus_is_found_by_sorting_all() -> None:
    flat = torch.linspace(0, 0.5, 1200)
    counts = counts_of(flat, 8_000, top_p=0.9)
    assert kept(counts) <= nucleus(flat.softmax(0), 0.9)
    assert len(kept(counts)) > 1000


def test_equal_logits_are_kept_or_rejected_together() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert kept(counts_of(logits, 5_000, top_k=2)) == {1, 2, 3}


KINDS = (
    Kind(temperature=0.0),
    Kind(),
    Kind(temperature=0.7, top_k=5),
    Kind(temperature=1.3, top_p=0.8),
    Kind(min_p=0.1),
    Kind(temperature=0.9, top_k=9, top_p=0.9, min_p=0.05),
)


def test_rows_of_all_kinds_in_one_batch_are_sampled_as_if_alone() -> None:
    num = 64
    kinds = [replace(KINDS[row % len(KINDS)], seed=row) for row in range(num)]
    many = torch.randn(num, V, generator=torch.Generator().manual_seed(8))
    positions = np.arange(num) * 3
    found = sample(many.clone(), rows_of(kinds), positions).tokens
    for row in range(num):
        alone = many[row : row + 1].clone()
        expected = sample(alone, rows_of(kinds[row : row + 1]), positions[row : row + 1])
        assert found[row] == expected.tokens[0], f"row {row}"
    greedy = slice(0, num, len(KINDS))
    assert found[greedy].tolist() == many[greedy].argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_gives_the_samples_of_torch(dtype: torch.dtype) -> None:
    num, vocab_size = 300, 5000
    logits = torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(9)) * 3
    kinds = [replace(KINDS[row % len(KINDS)], seed=row * 7, choice=row % 3) for row in range(num)]
    positions = np.arange(num)
    rows = rows_of(kinds)
    ours = sample(logits.to(dtype), rows, positions).tokens[rows.random_rows]
    keys = torch.from_numpy(gumbel_keys(rows, positions))
    temperature = torch.from_numpy(rows.parameters["temperature"])
    filters = Filters.of(rows.parameters, torch.device("cpu"))
    theirs = torch_sample(logits.to(dtype)[rows.random_rows], temperature, filters, keys)
    # Where two scores are all but equal, or a nucleus ends, the last bit may decide.
    assert (ours != theirs.numpy()).sum() <= 1


@pytest.mark.parametrize("size", [1, 511, 513, 5000])
@pytest.mark.parametrize("special", [0.0, -0.0, 50.0, -math.inf, math.inf, math.nan, -math.nan])
def test_the_argmax_in_bfloat16_is_that_of_its_float32(size: int, special: float) -> None:
    logits = torch.randn(64, size, generator=torch.Generator().manual_seed(size)).bfloat16()
    logits[:16] = -logits[:16].abs()  # a zero is their largest
    places = torch.randint(size, (64, 3), generator=torch.Generator().manual_seed(1))
    logits[8:] = logits[8:].scatter(1, places[8:], special)
    logits[-8:] = -math.inf
    bits = logits.view(torch.int16).numpy().view(np.uint16)
    tokens, values = cpu_argmax.argmax(bits)
    expected = logits.float().numpy()
    assert tokens.tolist() == expected.argmax(1).tolist()
    np.testing.assert_array_equal(values, expected.max(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_give_a_stopgap_and_are_reported(
    temperature: float, bad: float, dtype: torch.dtype
) -> None:
    logits = torch.zeros(3, V, dtype=dtype)
    logits[:, 7] = 50.0
    logits[1, 4] = bad
    found = sample(logits, rows(3, temperature=temperature), np.zeros(3, np.int64))
    assert found.tokens.tolist() == [7, 7, 7]
    assert found.broken.tolist() == [1]
    hopeless = sample(
        torch.full((1, V), bad, dtype=dtype), rows(1, temperature=temperature), np.zeros(1)
    )
    assert hopeless.tokens.tolist() == [0]


def test_masked_vocabulary_is_not_broken() -> None:
    logits = torch.zeros(1, V)
    logits[0, 1:] = float("-inf")
    found = sample(logits, rows(1), np.zeros(1, np.int64))
    assert (found.tokens.tolist(), found.broken.tolist()) == ([0], [])


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-30, 0.99 * LOWEST_TEMPERATURE])
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(
    executor: Executor, temperature: float
) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(11))
    planner.admit(2, prompt(11), sampling(temperature=temperature, top_p=0.9, seed=4))
    planner.admit(3, prompt(11), sampling(temperature=1.0, seed=4))
    planner.step(s1=11, s2=11, s3=11)
    greedy, tiny, random = planner.run(1, 12), planner.run(2, 12), planner.run(3, 12)
    assert tiny[:12] == greedy[:12] != random[:12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_lowest_temperature_gives_the_argmax(dtype: torch.dtype, top_p: float) -> None:
    many = torch.randn(64, V, generator=torch.Generator().manual_seed(5))
    for size in (1.0, 1e4):
        logits = (many * size).to(dtype)
        wanted = rows(64, temperature=LOWEST_TEMPERATURE, top_p=top_p, seed=3)
        found = sample(logits, wanted, np.arange(64))
        best = logits.amax(1)
        assert torch.equal(logits[torch.arange(64), torch.from_numpy(found.tokens)], best)
        assert not len(found.broken)


def test_a_sequence_samples_the_same_alone_among_others_and_after_preemption(
    executor: Executor,
) -> None:
    params = sampling(temperature=1.0, top_p=0.95, seed=99, max_tokens=20)
    tokens = prompt(11)
    alone = Planner(executor)
    alone.admit(1, tokens, params)
    alone.step(s1=11)
    expected = list(alone.run(1, 20))
    assert len(set(expected)) > 10

    executor.reset()
    others = Planner(executor, seed=1)
    for handle in range(2, 9):
        others.admit(handle, prompt(5 + handle, handle), sampling(temperature=0.8, seed=handle))
    others.step(**{f"s{handle}": 5 + handle for handle in range(2, 9)})
    others.admit(1, tokens, params)
    others.step(s1=6)
    others.step(s1=5)
    output = list(others.run(1, 8))
    others.retire(1)
    others.step()
    others.admit(1, tokens + output, params, num_prompt_tokens=11)
    others.step(s1=len(tokens + output))
    assert output + others.run(1, 12) == expected

    executor.reset()
    other = Planner(executor)
    other.admit(1, tokens, params, choice=1)
    other.step(s1=11)
    assert other.run(1, 20) != expected
