"""Texts with penalties and biases: tokens do not depend on how a sequence got here."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.sampling import SamplingParams, TokenBias
from tests.gpu_worker.conftest import MakeWorker, ModelPath, poison, prompt
from tests.gpu_worker.everything import PENALIZED
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan
from tests.gpu_worker.sampling.penalty_formulas import REPEATED, admission, expected

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def reference(model_path: ModelPath) -> Any:
    """The tiny Llama, run by transformers."""
    return load(model_path("llama"))


def load(path: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def generate(model: Any, tokens: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **settings,
    )
    found: list[int] = out[0, len(tokens) :].tolist()
    return found


def followed(executor: Executor, tokens: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens by the formulas, from logits of transformers' own attention."""
    found = list(tokens)
    for _ in range(NEW_TOKENS):
        logits = executor._model.eager_logits(torch.tensor(found))[-1]
        found.append(int(expected(logits, found, len(tokens), params).argmax()))
    return found[len(tokens) :]


def alone(
    executor: Executor, tokens: list[int], params: SamplingParams = PENALIZED, choice: int = 0
) -> list[int]:
    """The output of a sequence that is alone in the batch."""
    executor.reset()
    planner = Planner(executor, seed=1)
    planner.admit(1, tokens, params, choice=choice)
    planner.step(s1=len(tokens))
    output = list(planner.run(1, NEW_TOKENS))
    executor.reset()
    return output


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_greedy_text_is_that_of_transformers(
    kind: str, model_path: ModelPath, make_worker: MakeWorker
) -> None:
    model = load(model_path(kind))
    planner = Planner(make_worker(kind, block_size=8, num_blocks=128).executor)
    penalties = {1: 1.2, 2: 0.6, 3: 1.0, 4: 2.0}
    for handle, penalty in penalties.items():
        params = sampling(repetition_penalty=penalty, ignore_eos=True)
        planner.admit(handle, prompt(10 * handle, handle) * 2, params)
        planner.step(**{f"s{handle}": 7})
        planner.step(**{f"s{handle}": 20 * handle - 7})
    found = {handle: planner.run(handle, NEW_TOKENS)[:NEW_TOKENS] for handle in penalties}
    for handle, penalty in penalties.items():
        tokens = prompt(10 * handle, handle) * 2
        assert found[handle] == generate(model, tokens, repetition_penalty=penalty), handle
    assert len(set(found[1])) > len(set(found[2])), "the penalties are of no effect"


def test_greedy_text_with_biases_is_that_of_transformers(
    executor: Executor, reference: Any
) -> None:
    tokens = prompt(15)
    first = generate(reference, tokens)
    biases = {first[0]: -100.0, first[1]: -2.0, 17: 5.0, 3000: 2.5}
    params = sampling(
        repetition_penalty=1.1,
        logit_bias=tuple(TokenBias(token, bias) for token, bias in biases.items()),
    )
    settings = {"sequence_bias": {(token,): bias for token, bias in biases.items()}}
    wanted = generate(reference, tokens, repetition_penalty=1.1, **settings)
    assert wanted != first
    assert alone(executor, tokens, params) == wanted


@pytest.mark.parametrize(
    "params",
    [
        sampling(presence_penalty=2.0),
        sampling(frequency_penalty=0.7),
        sampling(frequency_penalty=-0.5, presence_penalty=1.0, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_greedy_text_follows_the_formulas(executor: Executor, params: SamplingParams) -> None:
    tokens = prompt(12) * 2
    wanted = followed(executor, tokens, params)
    assert alone(executor, tokens, params) == wanted


def test_only_generated_tokens_count_for_frequency_and_presence(executor: Executor) -> None:
    tokens = prompt(16)
    first = alone(executor, tokens, sampling())[0]
    tokens = [first, *tokens]  # in the prompt, and yet not penalized
    free = alone(executor, tokens, sampling())
    params = sampling(presence_penalty=2.0, frequency_penalty=2.0)
    assert alone(executor, tokens, params)[0] == free[0]


def test_texts_without_penalties_are_the_same_beside_penalized_ones(executor: Executor) -> None:
    drawn = sampling(temperature=1.0, top_p=0.95, seed=3)
    wanted = [alone(executor, prompt(11), params) for params in (sampling(), drawn)]
    penalized = alone(executor, prompt(11))
    planner = Planner(executor)
    for handle, params in enumerate((sampling(), PENALIZED, drawn, REPEATED), 1):
        planner.admit(handle, prompt(11), params)
        planner.step(**{f"s{handle}": 11})
    planner.run(4, NEW_TOKENS)
    assert planner.known[1].output[:NEW_TOKENS] == wanted[0]
    assert planner.known[2].output[:NEW_TOKENS] == penalized
    assert planner.known[3].output[:NEW_TOKENS] == wanted[1]


def test_choices_count_their_own_tokens(executor: Executor) -> None:
    wanted = [alone(executor, prompt(14), choice=choice) for choice in (0, 1, 2)]
    planner = Planner(executor)
    planner.admit(1, prompt(14), PENALIZED)
    planner.step(s1=6)
    planner.fork(1, 2, 1)
    planner.fork(1, 3, 2)
    planner.step(s1=8)
    planner.run(1, NEW_TOKENS)
    assert [planner.known[handle].output for handle in (1, 2, 3)] == wanted
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_sequence_that_is_computed_again_draws_the_same(
    executor: Executor, begins_anew: bool
) -> None:
    tokens = prompt(13)
    wanted = alone(executor, tokens)
    planner = Planner(executor)
    planner.admit(7, prompt(9, 7), REPEATED)
    planner.admit(1, tokens, PENALIZED)
    planner.step(s1=13, s7=9)
    output = list(planner.run(1, 10))
    if begins_anew:  # a new epoch
        executor.reset()
        poison(executor)
        planner = Planner(executor, seed=2)
    else:
        planner.retire(1)
        planner.step()
    planner.admit(1, tokens + output, PENALIZED, num_prompt_tokens=13)
    planner.step(s1=20)
    planner.step(s1=3)
    assert output + planner.run(1, NEW_TOKENS - 10) == wanted

    executor.reset()
    planner = Planner(executor)
    planner.admit(1, tokens + output, PENALIZED)  # as if all of it was prompt
    planner.step(s1=23)
    assert output + planner.run(1, NEW_TOKENS - 10) != wanted


def test_a_swapped_sequence_draws_the_same(executor: Executor) -> None:
    tokens = prompt(13)
    wanted = alone(executor, tokens)
    planner = Planner(executor)
    planner.admit(1, tokens, PENALIZED)
    planner.step(s1=13)
    known = tokens + planner.run(1, 9)
    gone = planner.known[1].blocks
    hosts = ints(*range(len(gone)))
    out = {"swap_out_device": ints(*gone), "swap_out_host": hosts}
    executor.execute(step_plan(10, retired=ints(1), **out))
    assert executor._penalties.num_rows == 0
    poison(executor)
    blocks = ints(*range(40, 45))
    back = replace(
        admission(1, known, 13, PENALIZED), num_computed=len(known) - 1, block_table=blocks
    )
    plan = step_plan(
        11,
        swap_in_host=hosts,
        swap_in_device=blocks[: len(hosts)],
        admissions=(back,),
        chunk_handles=ints(1),
        chunk_tokens=ints(1),
    )
    found = executor.execute(plan).tokens.tolist()
    for step in range(12, 12 + NEW_TOKENS - 10):
        found += executor.execute(step_plan(step)).tokens.tolist()
    assert found == wanted[9:]


def test_a_step_under_way_does_not_count_for_the_next_sequence(
    executor: Executor,
) -> None:
    wanted = alone(executor, prompt(9, 2))
    planner = Planner(executor)
    planner.admit(1, prompt(12), PENALIZED)
    planner.step(s1=12)
    before = executor.begin(step_plan(2))
    planner.retire(1)
    planner.admit(2, prompt(9, 2), PENALIZED)
    (new,) = planner._admissions
    chunk = {"chunk_handles": ints(2), "chunk_tokens": ints(9)}
    after = executor.begin(step_plan(3, retired=ints(1), admissions=(new,), **chunk))
    executor.finish(before)
    found = executor.finish(after).tokens.tolist()
    for step in range(4, 9):
        found += executor.execute(step_plan(step)).tokens.tolist()
    assert found == wanted[:6]
    assert executor._penalties.num_rows == 1


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_bias_of_a_hundred_forces_and_forbids(executor: Executor, temperature: float) -> None:
    params = sampling(temperature=temperature, seed=1)
    forced = replace(params, logit_bias=(TokenBias(77, 100.0),))
    assert set(alone(executor, prompt(8), forced)) == {77}
    free = alone(executor, prompt(8), params)
    forbidden = tuple(TokenBias(token, -100.0) for token in set(free))
    assert not set(alone(executor, prompt(8), replace(params, logit_bias=forbidden))) & set(free)
    beyond = replace(params, logit_bias=(TokenBias(4096, 100.0), TokenBias(-1, 100.0)))
    assert alone(executor, prompt(8), beyond) == free, "there are no such tokens"


def test_a_forced_end_is_banned_before_the_minimum(executor: Executor) -> None:
    params = sampling(
        stop_token_ids=(77,), min_tokens=4, logit_bias=(TokenBias(77, 100.0),), max_tokens=9
    )
    planner = Planner(executor)
    planner.admit(1, prompt(8), params)
    planner.step(s1=8)
    output = planner.run(1, 9)
    assert (output.index(77), planner.known[1].ended) == (4, EndFlag.STOP)


def test_log_probabilities_are_those_of_the_model(executor: Executor) -> None:
    planner = Planner(executor)
    params = replace(PENALIZED, num_logprobs=2)
    planner.admit(1, prompt(9), params)
    planner.step(s1=9)
    output = planner.run(1, 6)
    for step, result in enumerate(planner.results):
        tokens = torch.tensor(prompt(9) + output[:step])
        scores = executor._model.eager_logits(tokens)[-1].float().log_softmax(-1)
        (entry,) = result.logprobs
        assert entry.logprob == pytest.approx(scores[output[step]].item(), abs=1e-3)
        assert entry.top_ids.tolist() == scores.topk(2).indices.tolist()


def test_logits_that_are_no_numbers_are_still_found(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(
        "gpu_worker.step.executor.log.error", lambda *_, **what: errors.append(what)
    )
    planner = Planner(executor)
    planner.admit(1, prompt(9), PENALIZED)
    planner.admit(2, prompt(9), PENALIZED)
    planner.step(s1=9, s2=9)
    block = planner.known[2].blocks[0]
    for cache in executor.memory.layers.values():
        cache.value[block] = torch.nan
    planner.step()
    assert errors == [{"step": 2, "handles": [2]}]
    assert 0 <= planner.known[2].output[1] < 4096
