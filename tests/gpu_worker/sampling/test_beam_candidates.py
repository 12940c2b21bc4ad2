"""The continuations that a worker reports of a beam group: which, how many, with which flags."""

import numpy as np
import pytest
import torch

from gpu_worker.batch.rows import BeamRows
from gpu_worker.sampling.beam_candidates import beam_candidates
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.messages.plans import BeamStep
from tests.gpu_worker.beam_search import BeamSearch, beam_sampling, search
from tests.gpu_worker.conftest import prompt
from tests.gpu_worker.planner import Planner, ints
from tests.support.models import VOCAB_SIZE

LENGTH = 14


def test_end_of_sequence_counts_unless_ignored(executor: Executor) -> None:
    (eos,) = executor.limits.eos_token_ids
    counts = {}
    for ignored in (False, True):
        executor.reset()
        # Named again as a stop token, it is still one token.
        for stops in ((), (eos,), (eos, 7, 7)):
            params = beam_sampling(2, max_tokens=2, ignore_eos=ignored, stop_token_ids=stops)
            found = BeamSearch(Planner(executor), 1 + len(stops), prompt(5), params)
            search(found.planner, found)
            counts[ignored, len(stops)] = len(found.candidates[0].tokens)
    assert counts == {
        (False, 0): 4,
        (False, 1): 4,
        (False, 3): 6,
        (True, 0): 4,
        (True, 1): 4,
        (True, 3): 6,
    }


def test_there_are_no_more_candidates_than_continuations(executor: Executor) -> None:
    width = VOCAB_SIZE - 1
    found = BeamSearch(Planner(executor), 1, prompt(5), beam_sampling(width, max_tokens=1))
    search(found.planner, found)
    (candidates,) = found.candidates
    assert sorted(candidates.tokens.tolist()) == list(range(VOCAB_SIZE))
    assert (np.diff(candidates.scores) <= 0).all()
    assert set(candidates.flags.tolist()) == {EndFlag.LENGTH}


def test_candidates_are_the_likeliest_continuations(executor: Executor) -> None:
    tokens = prompt(9, 2)
    planner = Planner(executor)
    found = BeamSearch(planner, 1, tokens, beam_sampling(3, max_tokens=LENGTH))
    chunks = {"s100": 9}
    for _ in range(5):
        running = found.running
        found.plan_beams()
        found.take(planner.step(**chunks))
        chunks = {}
    logprobs = torch.stack(
        [
            executor._model.eager_logits(torch.tensor([*tokens, *beam.output]))[-1].log_softmax(-1)
            for beam in running
        ]
    )
    totals = logprobs + torch.tensor([beam.score for beam in running]).unsqueeze(1)
    best = totals.flatten().topk(6)
    candidates = found.candidates[-1]
    assert (candidates.parents * VOCAB_SIZE + candidates.tokens).tolist() == best.indices.tolist()
    np.testing.assert_allclose(candidates.scores, best.values.numpy(), rtol=1e-4)
    assert not candidates.flags.any()


def test_a_length_is_flagged_unless_it_is_a_stop(executor: Executor) -> None:
    tokens = prompt(6, 1)
    params = beam_sampling(2, max_tokens=2)
    free = BeamSearch(Planner(executor), 1, tokens, params)
    search(free.planner, free)
    assert [set(each.flags.tolist()) for each in free.candidates] == [{0}, {EndFlag.LENGTH}]
    stop = int(free.candidates[1].tokens[0])
    executor.reset()
    params = beam_sampling(2, max_tokens=2, stop_token_ids=(stop,))
    found = BeamSearch(Planner(executor), 1, tokens, params)
    search(found.planner, found)
    last = found.candidates[1]
    flags = dict(zip(last.tokens.tolist(), last.flags.tolist(), strict=True))
    assert flags.pop(stop) == EndFlag.STOP
    assert set(flags.values()) == {EndFlag.LENGTH}
    assert set(last.flags[last.tokens == stop].tolist()) == {EndFlag.STOP}


def test_broken_logits_give_stopgaps_and_are_reported(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(executor)
    params = beam_sampling(2, max_tokens=LENGTH)
    planner.admit(1, prompt(20), params, num_computed=8)  # of which nothing was ever written
    planner.admit(2, prompt(20), params)
    planner.beams(1, [1, 2], [-1.0, -2.0])
    planner.admit(3, prompt(9), params)
    planner.beams(2, [3], [0.0])
    with caplog.at_level("ERROR"):
        broken, fine = planner.step(s1=12, s2=20, s3=9).beams
    (record,) = caplog.records
    assert record.message == "logits are not finite"
    assert record.__dict__["fields"] == {"step": 1, "beams": [1]}
    assert len(broken.tokens) == len(fine.tokens) == 4
    for found in (broken, fine):
        assert np.isfinite(found.scores).all()
        assert (np.diff(found.scores) <= 0).all()
        assert ((found.tokens >= 0) & (found.tokens < VOCAB_SIZE)).all()
    assert 1 in broken.parents  # what is a number still counts


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_broken_logit_does_not_hide_the_others(executor: Executor, bad: float) -> None:
    groups, logits = two_beams(executor)
    logits[0, 5] = 50.0
    logits[0, 9] = bad
    (found,), broken = beam_candidates(logits, groups, executor.batch)
    assert executor.batch.handle[broken].tolist() == [1]
    assert (int(found.parents[0]), int(found.tokens[0])) == (0, 5)
    assert found.scores[0] == pytest.approx(0.0, abs=1e-3)


def test_impossible_tokens_are_no_candidates(executor: Executor) -> None:
    groups, logits = two_beams(executor)
    logits[:] = float("-inf")
    logits[0, 5] = logits[1, 7] = 0.0
    (found,), broken = beam_candidates(logits, groups, executor.batch)
    assert not len(broken)
    assert (found.parents.tolist(), found.tokens.tolist()) == ([0, 1], [5, 7])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 50, 1000])
def test_vocabularies_of_any_size_are_ranked(executor: Executor, vocab_size: int) -> None:
    groups, _ = two_beams(executor)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(2, vocab_size, generator=generator)
    (found,), _ = beam_candidates(logits, groups, executor.batch)
    totals = logits.log_softmax(-1) + torch.tensor([[0.0], [-1.0]])
    best = totals.flatten().topk(min(4, 2 * vocab_size))
    assert (found.parents * vocab_size + found.tokens).tolist() == best.indices.tolist()
    assert found.scores.tolist() == best.values.tolist()


def two_beams(executor: Executor) -> tuple[tuple[BeamRows, ...], torch.Tensor]:
    """Two beams of a group, which could go on, and logits of zeros."""
    planner = Planner(executor)
    for handle in (1, 2):
        planner.admit(handle, prompt(3, handle), beam_sampling(2))
    planner.beams(1, [1, 2], [0.0, -1.0])
    planner.step(s1=3, s2=3)
    step = BeamStep(1, ints(1, 2), np.array([0, -1], np.float32), ints(), ints())
    slots = np.array([np.flatnonzero(executor.batch.handle == handle)[0] for handle in (1, 2)])
    return (BeamRows(step, slots, np.arange(2)),), torch.zeros(2, VOCAB_SIZE)
