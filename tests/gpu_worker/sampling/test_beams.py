"""Beam search: candidates and what plans make of them give what transformers' generate gives."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.sampling import EarlyStopping
from tests.gpu_worker.beam_search import BeamSearch, Finished, beam_sampling, search
from tests.gpu_worker.conftest import MakeWorker, ModelPath, prompt
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan
from tests.support.weights import reference_model

LENGTH = 14
PAD = 1  # with 0, generate pads with an end token


@pytest.fixture(scope="module")
def reference(model_path: ModelPath) -> Any:
    """The tiny Llama in transformers, which nothing ends but what a test names."""
    return without_ends(reference_model(model_path("llama")))


def without_ends(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def generate(
    model: Any, tokens: list[int], width: int, ends: tuple[int, ...] = (), **options: Any
) -> list[tuple[list[int], float]]:
    """Outputs and scores of transformers' beam search, best first."""
    ids = torch.tensor([tokens])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        eos_token_id=list(ends) or None,
        output_scores=True,
        return_dict_in_generate=True,
        **{"max_new_tokens": LENGTH, **options},
    )
    outputs = found.sequences[:, len(tokens) :].tolist()
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def assert_equal(found: list[Finished], expected: list[tuple[list[int], float]]) -> None:
    padded = [
        [*each.output, *[PAD] * (len(output) - len(each.output))]
        for each, (output, _) in zip(found, expected, strict=True)
    ]
    assert padded == [output for output, _ in expected]
    np.testing.assert_allclose(
        [each.score for each in found], [score for _, score in expected], rtol=1e-4
    )


def likely_ends(executor: Executor, tokens: list[int], width: int) -> tuple[int, ...]:
    """Two tokens with which some beams would end early, and others late."""
    executor.reset()
    alone = BeamSearch(Planner(executor), 1, tokens, beam_sampling(width, max_tokens=LENGTH))
    search(alone.planner, alone)
    executor.reset()
    best = alone.finished[0].output
    return best[3], alone.finished[-1].output[6]


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 7, 8, 21])
def test_beams_equal_generate(executor: Executor, reference: Any, width: int, length: int) -> None:
    tokens = prompt(length, length)
    found = BeamSearch(Planner(executor), 1, tokens, beam_sampling(width, max_tokens=LENGTH))
    search(found.planner, found)
    if width == 1:  # there generate is not a beam search
        assert len(found.finished) == 1
        ids = torch.tensor([tokens])
        greedy = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False
        )
        assert list(found.finished[0].output) == greedy[0, length:].tolist()
    else:
        assert_equal(found.finished, generate(reference, tokens, width))
    assert len(executor.batch) > 0
    executor.execute(step_plan(99, retired=ints(*(beam.handle for beam in found.running))))
    assert len(executor.batch) == 0


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_that_end_equal_generate(
    executor: Executor,
    reference: Any,
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    tokens = prompt(10, 3)
    ends = likely_ends(executor, tokens, width)
    params = beam_sampling(
        width, length_penalty, early_stopping, max_tokens=LENGTH, stop_token_ids=ends
    )
    found = BeamSearch(Planner(executor), 1, tokens, params)
    search(found.planner, found)
    stopping: dict[EarlyStopping, bool | str] = {
        EarlyStopping.AT_ONCE: True,
        EarlyStopping.ESTIMATED: False,
        EarlyStopping.NEVER: "never",
    }
    expected = generate(
        reference,
        tokens,
        width,
        ends,
        length_penalty=length_penalty,
        early_stopping=stopping[early_stopping],
    )
    assert any((each.flags == EndFlag.STOP).any() for each in found.candidates)
    assert_equal(found.finished, expected)


@pytest.mark.parametrize("min_tokens", [2, 5])
def test_before_min_tokens_no_beam_ends(
    executor: Executor, reference: Any, min_tokens: int
) -> None:
    tokens = prompt(10, 3)
    ends = likely_ends(executor, tokens, 3)
    params = beam_sampling(3, max_tokens=LENGTH, stop_token_ids=ends, min_tokens=min_tokens)
    found = BeamSearch(Planner(executor), 1, tokens, params)
    search(found.planner, found)
    for step, candidates in enumerate(found.candidates):
        assert len(candidates.tokens) == 9
        stops = np.isin(candidates.tokens, ends)
        np.testing.assert_array_equal(stops, candidates.flags == EndFlag.STOP)
        assert step >= min_tokens or not stops.any()
    assert_equal(found.finished, generate(reference, tokens, 3, ends, min_new_tokens=min_tokens))


@pytest.mark.parametrize("kind", ["opt", "gpt2", "qwen3", "gemma2", "mistral"])
def test_beams_of_other_models_equal_generate(
    kind: str, model_path: ModelPath, make_worker: MakeWorker
) -> None:
    tokens = prompt(30, 5)
    planner = Planner(make_worker(kind, block_size=8).executor)
    found = BeamSearch(planner, 1, tokens, beam_sampling(4, max_tokens=LENGTH))
    search(planner, found)
    assert_equal(
        found.finished, generate(without_ends(reference_model(model_path(kind))), tokens, 4)
    )


def test_beams_in_a_full_batch_change_nothing(executor: Executor, reference: Any) -> None:
    drawn = sampling(temperature=1.0, top_k=200, seed=5)
    kinds = {11: sampling(), 12: drawn, 13: sampling(temperature=0.7, seed=8, num_logprobs=2)}

    def start(planner: Planner) -> dict[str, int]:
        for handle, params in kinds.items():
            planner.admit(handle, prompt(handle, handle), params)
        planner.fork(12, 14, 1)
        return {f"s{handle}": handle for handle in kinds}

    handles = [*kinds, 14]
    alone = Planner(executor)
    alone.step(**start(alone))
    expected = {handle: list(alone.run(handle, 30)[:30]) for handle in handles}

    executor.reset()
    planner = Planner(executor)
    chunks = start(planner)
    first = BeamSearch(planner, 1, prompt(10, 1), beam_sampling(4, max_tokens=LENGTH))
    first.plan_beams()
    first.take(result := planner.step(s100=10, **chunks))
    assert result.handles.tolist() == [11, 12, 13, 14]
    assert [entry.row for entry in result.logprobs] == [2]
    second = BeamSearch(planner, 2, prompt(20, 2), beam_sampling(3, max_tokens=LENGTH))
    for chunk in (9, 8):
        first.plan_beams()
        first.take(result := planner.step(s200=chunk))
        assert [each.group for each in result.beams] == [1]
        assert result.num_batched_tokens == len(handles) + 4 + chunk
    first.plan_beams()
    second.plan_beams()
    first.take(result := planner.step(s200=3))
    second.take(result)
    search(planner, first, second)
    for result in planner.results:
        assert result.handles.tolist() == handles
    for handle in handles:
        assert planner.run(handle, 30)[:30] == expected[handle]
    assert_equal(first.finished, generate(reference, prompt(10, 1), 4))
    assert_equal(second.finished, generate(reference, prompt(20, 2), 3))


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_group_that_comes_back_goes_on_where_it_was(
    executor: Executor, reference: Any, in_chunks: bool
) -> None:
    tokens = prompt(12, 4)
    expected = generate(reference, tokens, 4)
    planner = Planner(executor)
    found = BeamSearch(planner, 1, tokens, beam_sampling(4, max_tokens=LENGTH))
    chunks = {"s100": 12}
    for _ in range(6):
        found.plan_beams()
        found.take(planner.step(**chunks))
        chunks = {}
    found.give_up()
    chunks = found.come_back()
    if in_chunks:
        result = planner.step(**{name: size - 4 for name, size in chunks.items()})
        assert (result.handles.tolist(), result.beams) == ([], ())
        chunks = dict.fromkeys(chunks, 4)
    found.plan_beams()
    result = planner.step(**chunks)
    assert result.handles.tolist() == []
    found.take(result)
    search(planner, found)
    assert_equal(found.finished, expected)
    assert len(found.candidates) == LENGTH


def test_beams_may_swap_places(executor: Executor) -> None:
    """Parents are taken as they were before the plan, in whichever order beams name them."""
    planner = Planner(executor)
    params = beam_sampling(3, max_tokens=LENGTH)
    planner.admit(1, prompt(6, 1), params)
    planner.beams(1, [1], [0.0])
    planner.step(s1=6)
    planner.beams(1, [1, 2, 3], [0.0, 0.0, 0.0], (1, 1, 1), (50, 60, 70))
    planner.step()
    planner.beams(1, [4, 2, 1], [0.0, 0.0, 0.0], (1, 2, 1), (51, 61, 52))
    planner.retire(3)
    found = planner.step().beams[0]
    for index, output in enumerate(([50, 51], [60, 61], [50, 52])):
        logits = executor._model.eager_logits(torch.tensor(prompt(6, 1) + output))[-1]
        logprobs = logits.log_softmax(-1)
        own = found.parents == index
        assert own.any()
        np.testing.assert_allclose(
            found.scores[own], logprobs[found.tokens[own].tolist()].numpy(), atol=1e-3
        )
