"""Log-probabilities are torch's own, of the model's raw logits."""

import numpy as np
import pytest
import torch

from gpu_worker.step.executor import Executor
from shared.messages.logprobs import TokenLogprobs
from tests.gpu_worker.conftest import prompt
from tests.gpu_worker.planner import Planner, sampling


def expected_logprobs(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V]: row p scores token p + 1; by transformers' own attention."""
    logits = executor._model.eager_logits(torch.tensor(tokens))
    return logits.float().log_softmax(-1)


def check(found: TokenLogprobs, token: int, expected: torch.Tensor, num_top: int) -> None:
    assert found.logprob == pytest.approx(expected[token].item(), abs=1e-3)
    top = expected.topk(num_top) if num_top else None
    assert len(found.top_ids) == len(found.top_logprobs) == num_top
    if top is not None:
        assert found.top_ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(found.top_logprobs, top.values.numpy(), atol=1e-3)


def test_of_sampled_tokens_for_the_rows_that_ask(executor: Executor) -> None:
    planner = Planner(executor)
    asks = {1: None, 2: 3, 3: 0}
    for handle, wanted in asks.items():
        params = sampling(temperature=1.2, top_k=50, seed=handle, num_logprobs=wanted)
        planner.admit(handle, prompt(9, handle), params)
    planner.step(s1=9, s2=9, s3=9)
    for _ in range(4):
        planner.step()
    for step, result in enumerate(planner.results):
        assert [int(result.handles[entry.row]) for entry in result.logprobs] == [2, 3]
        for entry in result.logprobs:
            handle = int(result.handles[entry.row])
            output = planner.known[handle].output
            scores = expected_logprobs(executor, prompt(9, handle) + output[:step])
            check(entry, output[step], scores[-1], asks[handle] or 0)


def test_are_taken_before_the_end_is_banned(executor: Executor) -> None:
    planner = Planner(executor)
    scores = expected_logprobs(executor, prompt(9))[-1]
    likeliest = int(scores.argmax())
    params = sampling(stop_token_ids=(likeliest,), min_tokens=2, num_logprobs=1)
    planner.admit(1, prompt(9), params)
    result = planner.step(s1=9)
    assert result.tokens[0] != likeliest
    check(result.logprobs[0], int(result.tokens[0]), scores, 1)


def test_of_the_prompt_come_with_its_chunks(executor: Executor) -> None:
    tokens = prompt(30)
    planner = Planner(executor)
    planner.admit(1, tokens, sampling(num_prompt_logprobs=2, num_logprobs=1))
    planner.admit(2, prompt(5, 2))
    planner.admit(3, prompt(6, 3), sampling(num_prompt_logprobs=0))
    found: dict[int, list[TokenLogprobs]] = {1: [], 3: []}
    for chunks in ({"s1": 1, "s2": 5}, {"s1": 16}, {"s1": 12, "s3": 6}, {"s1": 1}, {}):
        result = planner.step(**chunks)
        for entry in result.prompt_logprobs:
            found[entry.handle] += entry.positions
    assert [entry.row for entry in found[1]] == list(range(1, 30))
    assert [entry.row for entry in found[3]] == list(range(1, 6))
    for handle, num_top, sequence in ((1, 2, tokens), (3, 0, prompt(6, 3))):
        scores = expected_logprobs(executor, sequence)
        for entry in found[handle]:
            check(entry, sequence[entry.row], scores[entry.row - 1], num_top)
    assert planner.known[1].output[0] == int(expected_logprobs(executor, tokens)[-1].argmax())


def test_of_the_prompt_do_not_cover_recomputed_output(executor: Executor) -> None:
    planner = Planner(executor)
    params = sampling(num_prompt_logprobs=1)
    planner.admit(1, prompt(12), params, num_prompt_tokens=8)
    result = planner.step(s1=12)
    assert [entry.row for entry in result.prompt_logprobs[0].positions] == list(range(1, 8))
