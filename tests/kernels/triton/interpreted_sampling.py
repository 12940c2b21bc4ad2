"""The Triton kernels that change logits and choose tokens, in Triton's interpreter."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gpu_worker.sampling.device_sampling import DeviceSampling
from gpu_worker.sampling.gumbel import row_keys
from kernels.triton.sampling import sampler
from tests.gpu_worker.sampling import torch_sampler
from tests.gpu_worker.sampling.penalty_formulas import penalize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Temperature, top-k, top-p, min-p.
KINDS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 9, 0.9, 0.05),
    (2.0, 0, 1e-38, 0.0),
    (5.0, 4000, 0.999, 0.0),
)


@dataclass(frozen=True)
class Rows:
    """Rows of all kinds in turn, and the keys of their noise."""

    random: np.ndarray  # [N] rows with a temperature
    parameters: dict[str, np.ndarray]
    keys: torch.Tensor

    @staticmethod
    def of(num: int, kinds=KINDS) -> "Rows":
        wanted = [kinds[row % len(kinds)] for row in range(num)]
        random = np.array([row for row in range(num) if wanted[row][0] > 0], np.int64)
        types = {
            "temperature": np.float32, "top_k": np.int64, "top_p": np.float32, "min_p": np.float32,
        }  # fmt: skip
        parameters = {
            name: np.array([wanted[row][index] for row in random], dtype)
            for index, (name, dtype) in enumerate(types.items())
        }
        seeds, zeros = random.astype(np.uint64) * 7, np.zeros(len(random), np.int64)
        keys = np.ascontiguousarray(row_keys(seeds, zeros, random))
        return Rows(random, parameters, torch.from_numpy(keys).to(device()))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = DeviceSampling.of(len(logits), self.random, self.parameters, device())
        return found.choose(logits, self.keys)

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """The tokens of the reference."""
        tokens = logits.float().argmax(1)
        filters = torch_sampler.Filters.of(self.parameters, device())
        temperature = torch.from_numpy(self.parameters["temperature"]).to(device())
        rows = torch.from_numpy(self.random).to(device())
        tokens[rows] = torch_sampler.sample(logits[rows], temperature, filters, self.keys)
        return tokens


def device() -> torch.device:
    return torch.get_default_device()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cpu") * 3).to(device())


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [*((37, dtype) for dtype in DTYPES), (2 * sampler.SAMPLE_TILE + 5, torch.bfloat16)],
)
def test_tokens_are_those_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    num = len(KINDS)
    rows = Rows.of(num)
    logits = random(num, vocab_size + 3, seed=vocab_size)[:, :vocab_size].to(dtype)
    tokens, broken = rows.choose(logits)
    assert not broken.any()
    # Where two scores are all but equal, or a nucleus ends, the last bit may decide.
    assert (tokens != rows.expected(logits)).sum() <= 1


def test_equal_logits_are_kept_or_rejected_together() -> None:
    logits = torch.full((12, 50), -5.0, device=device())
    logits[:, [4, 9, 30]] = 2.0
    logits[:, 7] = 2.5
    for kind in ((3.0, 2, 1.0, 0.0), (3.0, 0, 0.4, 0.0)):
        tokens, _ = Rows.of(12, (kind,)).choose(logits)
        assert set(tokens.tolist()) == {4, 7, 9, 30}
    # Of the two that count in top-k, the first holds enough of the mass.
    tokens, _ = Rows.of(2, ((3.0, 2, 0.5, 0.0),)).choose(logits[:2])
    assert set(tokens.tolist()) == {7}


def test_banned_tokens_are_never_sampled() -> None:
    logits = torch.full((24, 60), -torch.inf, device=device())
    logits[:, [3, 50]] = 1.0
    logits[:, 20] = -2.0
    tokens, broken = Rows.of(24).choose(logits)
    assert set(tokens.tolist()) <= {3, 20, 50}
    assert not broken.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_rows_get_the_argmax_of_their_numbers(bad: float) -> None:
    logits = random(6, 40)
    logits[:, 7] = 50.0
    logits[2, 4] = bad
    logits[5] = bad
    tokens, broken = Rows.of(6, ((1.0, 0, 0.5, 0.0), (0.0, 0, 1.0, 0.0))).choose(logits)
    assert broken.tolist() == [False, False, True, False, False, True]
    assert tokens.tolist() == [7, 7, 7, 7, 7, 0]


def test_the_first_of_equal_logits_is_the_argmax() -> None:
    logits = torch.zeros((2, sampler.SAMPLE_TILE + 50), device=device())
    logits[:, [9, 3, sampler.SAMPLE_TILE + 3]] = 1.0
    tokens, _ = Rows.of(2, (KINDS[0], (1.0, 1, 1.0, 0.0))).choose(logits)
    assert tokens[0] == 3
    assert tokens[1] in (3, 9, sampler.SAMPLE_TILE + 3)


def test_penalties_are_those_of_the_reference() -> None:
    vocab_size = sampler.PENALTY_TILE + 9
    logits = random(5, vocab_size)
    counts = torch.randint(0, 6, (7, vocab_size), dtype=torch.int32, device="cpu").to(device())
    places, rows = (torch.tensor(each, device=device()) for each in ([4, 0, 2], [1, 6, 3]))
    penalties = torch.tensor(
        [[1.3, 0.5, -0.2], [0.7, -1.0, 0.3], [1.0, 0.001, 0.0]], device=device()
    ).unsqueeze(2)
    found, expected = logits.clone(), logits.clone()
    sampler.penalize(found, places, counts, rows, penalties)
    penalize(expected, places, counts, rows, penalties)
    assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused() -> None:
    rows, logits = Rows.of(4), random(4, 40)
    with pytest.raises(ValueError, match="for 5 rows"):
        DeviceSampling.of(4, rows.random, rows.parameters, device()).choose(
            random(5, 40), rows.keys
        )
    with pytest.raises(ValueError, match="not contiguous"):
        rows.choose(random(40, 4).T)
    with pytest.raises(ValueError, match="float64"):
        rows.choose(logits.double())
    place = torch.zeros(1, dtype=torch.int64, device=device())
    counts = torch.zeros((1, 41), dtype=torch.int32, device=device())
    with pytest.raises(ValueError, match="counts"):
        sampler.penalize(logits, place, counts, place, torch.ones((1, 3, 1), device=device()))
