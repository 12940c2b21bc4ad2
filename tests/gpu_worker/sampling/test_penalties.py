"""Penalties and biases: the formulas, and the counts of tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.sampling.penalties import PenalizedRows, Penalties
from gpu_worker.step.executor import Executor
from shared.sampling import TokenBias
from tests.gpu_worker.conftest import prompt
from tests.gpu_worker.everything import PENALIZED
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan
from tests.gpu_worker.sampling.penalty_formulas import REPEATED, admission, expected, penalize

CPU = torch.device("cpu")
V = 50


def rows_of(penalties: Penalties, handles: Sequence[int]) -> PenalizedRows:
    """All rows of a step, one for each sequence."""
    found = penalties.rows(np.arange(len(handles)), ints(*handles))
    assert found is not None
    return found


KINDS = (
    sampling(repetition_penalty=1.7),
    sampling(repetition_penalty=0.5, logit_bias=(TokenBias(4, 7.5), TokenBias(49, -100.0))),
    sampling(presence_penalty=1.5),
    sampling(presence_penalty=-2.0, frequency_penalty=0.25),
    sampling(frequency_penalty=2.0, logit_bias=(TokenBias(0, 100.0),)),
    sampling(logit_bias=(TokenBias(7, -3.0), TokenBias(8, 3.0))),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_changed_as_transformers_and_openai_define(dtype: torch.dtype) -> None:
    rng, generator = np.random.default_rng(4), torch.Generator().manual_seed(4)
    penalties = Penalties(V, 2, CPU)  # fewer than there will be
    sequences = {handle: rng.integers(V, size=4 + handle).tolist() for handle in range(1, 14)}
    params = {handle: KINDS[handle % len(KINDS)] for handle in sequences}
    nums_prompt = {handle: 1 + handle % 5 for handle in sequences}
    for handle, tokens in sequences.items():  # some come with tokens that were generated
        new = admission(handle, tokens, nums_prompt[handle], params[handle])
        penalties.follow(step_plan(handle, admissions=(new,)))
    rows = rows_of(penalties, list(sequences))
    for _ in range(8):
        logits = (torch.randn(len(sequences), V, generator=generator) * 3).to(dtype)
        found = rows.changed(logits.clone())
        assert found.dtype == torch.float32
        by_torch = replace(rows, places=rows.places[:0], rows=rows.rows[:0]).changed(logits.clone())
        penalize(by_torch, rows.places, penalties.counts, rows.rows, rows.penalties)
        assert torch.equal(found, by_torch), "the compiled loop is not torch's arithmetic"
        for row, (handle, tokens) in enumerate(sequences.items()):
            wanted = expected(logits[row], tokens, nums_prompt[handle], params[handle])
            torch.testing.assert_close(found[row], wanted, rtol=1e-6, atol=1e-6)
        chosen = rng.integers(12, size=len(sequences))  # some of them again and again
        rows.count(torch.from_numpy(chosen))
        for tokens, token in zip(sequences.values(), chosen.tolist(), strict=True):
            tokens.append(token)


def test_other_rows_keep_their_bits() -> None:
    penalties = Penalties(V, 4, CPU)
    news = tuple(admission(handle, [1, 2, handle], 2, PENALIZED) for handle in (1, 2))
    penalties.follow(step_plan(1, admissions=news))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows = penalties.rows(np.array([1, 4]), ints(1, 2))
        assert rows is not None
        found = rows.changed(logits.clone())
        assert torch.equal(found[[0, 2, 3]], logits[[0, 2, 3]].float())
        assert not (found[[1, 4]] == logits[[1, 4]]).all(1).any()


def test_a_small_penalty_is_not_rounded_away_with_bfloat16_logits() -> None:
    penalties = Penalties(V, 1, CPU)
    params = sampling(frequency_penalty=0.001)
    penalties.follow(step_plan(1, admissions=(admission(1, [9, 3], 1, params),)))
    logits = torch.zeros(1, V, dtype=torch.bfloat16)
    logits[0, [3, 5]] = 20.0
    assert rows_of(penalties, [1]).changed(logits).argmax(1).tolist() == [5]


def test_counts_are_those_of_an_admission_with_the_same_tokens(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(20), PENALIZED)
    planner.step(s1=11)
    planner.fork(1, 2, 1)
    planner.step(s1=9)
    planner.run(1, 30)
    fresh = Penalties(4096, 2, CPU)
    for handle in (1, 2):
        tokens = prompt(20) + planner.known[handle].output
        fresh.follow(step_plan(handle, admissions=(admission(handle, tokens, 20, PENALIZED),)))
    ours, theirs = executor._penalties, fresh
    for handle in (1, 2):
        found = [of.counts[of._sequences[handle].row] for of in (ours, theirs)]
        assert torch.equal(*found)


def test_rows_of_counts_are_given_back(executor: Executor) -> None:
    penalties = executor._penalties
    planner = Planner(executor)
    planner.admit(1, prompt(9))
    planner.admit(2, prompt(9), sampling(logit_bias=(TokenBias(5, 1.0),)))
    planner.fork(2, 3, 1)
    planner.step(s1=9, s2=9)
    assert penalties.num_rows == 0, "no sequence has a penalty"
    planner.admit(4, prompt(9), REPEATED)
    planner.fork(4, 5, 1)
    planner.step(s4=9)
    assert penalties.num_rows == 2
    planner.retire(4)
    planner.retire(1)
    planner.step()
    assert penalties.num_rows == 1
    planner.retire(5)
    planner.retire(3)
    planner.admit(6, prompt(9), REPEATED)
    planner.step(s6=9)
    assert penalties.num_rows == 1
    executor.reset()
    assert (penalties.num_rows, penalties._sequences) == (0, {})
