"""Blocks that sequences share: forks, copies on write, and cached prefixes."""

from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.startup.build import Worker
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.messages.plans import Admission
from shared.sampling import SamplingParams
from tests.gpu_worker.conftest import MakeWorker, prompt
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan

NUM_TOKENS = 12
DRAWN = sampling(temperature=1.0, top_k=200, seed=5, num_logprobs=2)


@pytest.fixture(scope="module", params=["paged", "virtual"])
def llama(request: pytest.FixtureRequest, make_worker: MakeWorker) -> Worker:
    """A worker with a tiny Llama and blocks of eight tokens, in memory of either kind."""
    return make_worker("llama", block_size=8, kv_memory=request.param)


def alone(
    executor: Executor, tokens: list[int], params: SamplingParams, choice: int = 0
) -> list[int]:
    """The output of a sequence that shares nothing."""
    executor.reset()
    planner = Planner(executor, seed=1)
    planner.admit(1, tokens, params, choice=choice)
    planner.step(s1=len(tokens))
    output = list(planner.run(1, NUM_TOKENS))[:NUM_TOKENS]
    executor.reset()
    return output


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_forks_generate_what_each_choice_generates_alone(executor: Executor, length: int) -> None:
    tokens = prompt(length)
    expected = [alone(executor, tokens, DRAWN, choice) for choice in range(4)]
    assert len({tuple(output) for output in expected}) == 4
    planner = Planner(executor)
    planner.admit(9, prompt(5, 9))
    planner.admit(1, tokens, DRAWN)
    for choice in range(1, 4):
        planner.fork(1, 1 + choice, choice)
    result = planner.step(s9=5, s1=length)
    assert result.handles.tolist() == [9, 1, 2, 3, 4]
    assert [entry.row for entry in result.logprobs] == [1, 2, 3, 4]
    for entry in result.logprobs[1:]:
        np.testing.assert_array_equal(entry.top_logprobs, result.logprobs[0].top_logprobs)
    planner.run(1, NUM_TOKENS)
    for choice in range(4):
        assert planner.known[1 + choice].output[:NUM_TOKENS] == expected[choice]
    assert planner.run(9, NUM_TOKENS) == alone(executor, prompt(5, 9), sampling())


def test_forks_of_a_prompt_in_chunks_beside_decodes(executor: Executor) -> None:
    tokens = prompt(30)
    expected = [alone(executor, tokens, DRAWN, choice) for choice in (0, 1)]
    planner = Planner(executor)
    planner.admit(9, prompt(5, 9))
    planner.admit(1, tokens, DRAWN)
    planner.step(s9=5, s1=13)
    planner.step(s1=10)
    planner.fork(1, 2, 1)
    planner.step(s1=7)
    planner.run(1, NUM_TOKENS)
    assert [planner.known[handle].output[:NUM_TOKENS] for handle in (1, 2)] == expected


def test_a_sequence_that_decodes_may_fork(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(6), DRAWN)
    planner.step(s1=6)
    planner.step()
    before = prompt(6) + planner.known[1].output
    planner.fork(1, 2, 3)
    assert planner.step().handles.tolist() == [1, 2]
    forked = list(planner.run(2, 5))
    parent = list(planner.known[1].output)
    executor.reset()
    planner = Planner(executor, seed=2)
    planner.admit(2, before, DRAWN, num_prompt_tokens=6, choice=3)
    planner.step(s2=8)
    assert planner.run(2, 5) == forked
    assert alone(executor, prompt(6), DRAWN)[: len(parent)] == parent


def test_each_fork_ends_by_itself(executor: Executor) -> None:
    tokens = prompt(6)
    firsts = [alone(executor, tokens, DRAWN, choice)[0] for choice in range(3)]
    params = sampling(temperature=1.0, top_k=200, seed=5, stop_token_ids=(firsts[1],))
    planner = Planner(executor)
    planner.admit(1, tokens, params)
    planner.fork(1, 2, 1)
    planner.fork(1, 3, 2)
    result = planner.step(s1=6)
    assert result.tokens.tolist() == firsts
    assert (result.ended_rows.tolist(), result.ended_flags.tolist()) == ([1], [EndFlag.STOP])
    assert planner.step().handles.tolist() == [1, 3]


def test_a_copy_for_an_ended_sequence_is_tolerated(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(6), sampling(max_tokens=1))
    planner.step(s1=6)
    block = planner.known[1].blocks[0]
    late = {"copy_sources": ints(block), "copy_targets": ints((block + 1) % 64)}
    late |= {"replaced_handles": ints(1), "replaced_columns": ints(0)}
    assert executor.execute(step_plan(2, **late)).num_batched_tokens == 0


def test_prompt_logprobs_are_reported_for_the_parent_only(executor: Executor) -> None:
    params = sampling(temperature=1.0, seed=3, num_prompt_logprobs=1)
    planner = Planner(executor)
    planner.admit(1, prompt(9), params)
    planner.fork(1, 2, 1)
    assert [entry.handle for entry in planner.step(s1=9).prompt_logprobs] == [1]
    again = prompt(9) + planner.known[1].output
    planner.retire(1)
    planner.admit(3, again, params, num_prompt_tokens=9, choice=1)
    assert planner.step(s3=10).prompt_logprobs == ()


def test_a_known_prefix_is_not_computed_again(executor: Executor) -> None:
    first, second = prompt(24) + prompt(5, 1), prompt(24) + prompt(9, 2)
    expected = [alone(executor, tokens, sampling()) for tokens in (first, second)]
    planner = Planner(executor)
    planner.admit(1, first)
    planner.step(s1=29)
    planner.admit(2, second, like=1, num_computed=24)
    result = planner.step(s2=9)
    assert result.num_batched_tokens == 10
    assert result.admitted_handles.tolist() == [2]
    assert result.admitted_computed.tolist() == [24]
    planner.run(2, NUM_TOKENS)
    assert [planner.known[handle].output[:NUM_TOKENS] for handle in (1, 2)] == expected


def test_a_prefix_may_be_computed_in_the_same_step(executor: Executor) -> None:
    first, second = prompt(24) + prompt(5, 1), prompt(24) + prompt(9, 2)
    expected = [alone(executor, tokens, sampling()) for tokens in (first, second)]
    for order in ((1, 2), (2, 1)):
        executor.reset()
        planner = Planner(executor)
        planner.admit(1, first)
        planner.admit(2, second, like=1, num_computed=24)
        sizes = {1: 29, 2: 9}
        result = planner.step(**{f"s{handle}": sizes[handle] for handle in order})
        assert result.admitted_computed.tolist() == [0, 24]
        planner.run(1, NUM_TOKENS)
        assert [planner.known[handle].output[:NUM_TOKENS] for handle in (1, 2)] == expected


def test_a_plan_without_rows_echoes_its_admissions(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(20))
    planner.admit(2, prompt(20), like=1, num_computed=16)
    result = planner.step()
    assert result.admitted_handles.tolist() == [1, 2]
    assert result.admitted_computed.tolist() == [0, 16]


def copy(source: int, target: int, handle: int = 1, column: int = 0) -> dict[str, Any]:
    return {
        "copy_sources": ints(source),
        "copy_targets": ints(target),
        "replaced_handles": ints(handle),
        "replaced_columns": ints(column),
    }


def fork(parent: int, child: int, choice: int) -> dict[str, Any]:
    return {
        "fork_parents": ints(parent),
        "fork_children": ints(child),
        "fork_choices": ints(choice),
    }


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (copy(0, 1, handle=9), "sequence 9 is unknown"),
        (copy(0, 64), "no block 64"),
        (copy(-1, 1), "no block -1"),
        (copy(0, 0), "from and to"),
        (copy(0, 1, column=1), "no block at 1"),
        (copy(0, 1, column=-1), "no block at -1"),
        (copy(3, 1), "does not have block 3"),
        ({"copy_sources": ints(0, 0), "copy_targets": ints(1, 1)}, "copied to twice"),
        ({"copy_sources": ints(0), "copy_targets": ints(1)}, "belong together"),
        (fork(9, 2, 1), "sequence 9 is unknown"),
        (fork(1, 1, 1), "1 is here already"),
        (fork(1, 2, 0), "cannot have choice 0"),
        (fork(1, 2, -1), "cannot have choice -1"),
        (fork(1, 2, 1), "do not sample"),
        ({**fork(1, 2, 1), "fork_choices": ints()}, "belong together"),
        ({**fork(1, 2, 1), "grown_handles": ints(2), "grown_blocks": ints(7)}, "2 is unknown"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    executor: Executor, fields: dict[str, Any], why: str
) -> None:
    new = Admission(
        handle=1,
        choice=0,
        tokens=ints(5, 6, 7),
        num_prompt_tokens=3,
        num_computed=0,
        block_table=ints(0),
        sampling=sampling(),
    )
    executor.execute(step_plan(1, admissions=(new,)))
    with pytest.raises(PlanRefused, match=why):
        executor.execute(step_plan(2, **fields))
