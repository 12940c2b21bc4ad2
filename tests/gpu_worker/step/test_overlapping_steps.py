"""Steps that begin before the one before is finished: the same results, in the same order."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from tests.gpu_worker.conftest import MakeWorker, prompt
from tests.gpu_worker.everything import PENALIZED
from tests.gpu_worker.overlapping import Overlapping
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan

DRAWN = sampling(temperature=1.0, top_k=200, seed=5)


def one_after_the_other(executor: Executor) -> Planner:
    return Planner(executor)


def overlapping(executor: Executor) -> Planner:
    return Planner(Overlapping(executor))  # type: ignore[arg-type]


def outputs(planner: Planner) -> dict[int, list[int]]:
    """Tokens of each sequence up to its end; asserts that there are none after it."""
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    for result in planner.results:
        handles = result.handles.tolist()
        assert not ended.intersection(handles), result.step
        for handle, token in zip(handles, result.tokens.tolist(), strict=True):
            found.setdefault(handle, []).append(token)
        ended.update(handles[row] for row in result.ended_rows.tolist())
    return found


def same_both_ways(
    executor: Executor, script: Callable[[Planner], None]
) -> tuple[Planner, Planner]:
    """Run a script on two planners, one with and one without overlap."""
    planners = []
    for order in (one_after_the_other, overlapping):
        executor.reset()
        planner = order(executor)
        script(planner)
        planner.step()  # completes the last result
        planners.append(planner)
    first, second = (outputs(planner) for planner in planners)
    assert first.keys() == second.keys()
    for handle, tokens in second.items():
        common = min(len(tokens), len(first[handle]))
        assert common > 3 or len(tokens) == len(first[handle])
        assert tokens[:common] == first[handle][:common], f"sequence {handle}"
    return planners[0], planners[1]


def test_the_next_tokens_come_from_the_device(executor: Executor) -> None:
    def script(planner: Planner) -> None:
        planner.admit(1, prompt(19))
        planner.admit(2, prompt(33, 2), DRAWN)
        planner.step(s1=19, s2=10)
        planner.step(s2=23)
        planner.fork(1, 9, 4)  # of a sequence that decodes already
        planner.admit(3, prompt(5, 3), DRAWN)
        planner.fork(3, 4, 1)
        planner.step(s3=5)
        planner.run(4, 12)
        planner.admit(5, prompt(12, 5))
        planner.step(s5=12)
        planner.run(5, 6)
        planner.admit(6, prompt(11, 6), PENALIZED)
        planner.fork(6, 7, 1)
        planner.step(s6=11)
        planner.admit(8, prompt(11, 6), replace(PENALIZED, seed=8))
        planner.step(s8=11)
        planner.run(8, 12)

    same_both_ways(executor, script)


def test_what_was_computed_after_an_end_is_left_out(executor: Executor) -> None:
    executor.reset()
    free = Planner(executor)
    free.admit(1, prompt(12))
    free.step(s1=12)
    stop = free.run(1, 8)[5]
    asking = {"num_logprobs": 2}

    def script(planner: Planner) -> None:
        planner.admit(1, prompt(12), sampling(stop_token_ids=(stop,), **asking))
        planner.admit(2, prompt(12), sampling(ignore_eos=True, **asking))
        planner.admit(3, prompt(9, 3), sampling(max_tokens=4, **asking))
        planner.step(s1=12, s2=12, s3=9)
        planner.run(2, 14)

    plain, over = same_both_ways(executor, script)
    assert {handle: seq.ended for handle, seq in over.known.items()} == {
        1: EndFlag.STOP,
        2: 0,
        3: EndFlag.LENGTH,
    }
    assert over.known[1].output == plain.known[1].output
    for result in over.results:
        assert [entry.row for entry in result.logprobs] == list(range(len(result.handles)))
    # It was computed once more, because its end was not known yet.
    assert sum(r.num_batched_tokens for r in over.results[:9]) > sum(
        r.num_batched_tokens for r in plain.results[:8]
    )


def test_an_end_does_not_affect_the_next_sequence_in_the_slot(executor: Executor) -> None:
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, prompt(12))
    planner.step(s1=12)
    stop = planner.run(1, 3)[2]
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, prompt(12), sampling(stop_token_ids=(stop,)))
    planner.step(s1=12)
    planner.step()
    ends = executor.begin(step_plan(3))
    planner.retire(1)
    planner.admit(2, prompt(9, 2))
    (new,) = planner._admissions
    follows = executor.begin(
        step_plan(
            4,
            retired=ints(1),
            admissions=(new,),
            chunk_handles=ints(2),
            chunk_tokens=ints(9),
        )
    )
    first = executor.finish(ends)
    assert (first.handles.tolist(), first.ended_flags.tolist()) == ([1], [EndFlag.STOP])
    assert executor.finish(follows).handles.tolist() == [2]
    assert executor.execute(step_plan(5)).handles.tolist() == [2], "it goes on"


def test_a_forgotten_step_leaves_nothing_behind(executor: Executor) -> None:
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, prompt(12))
    planner.step(s1=12)
    expected = list(planner.run(1, 4))
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, prompt(12))
    planner.step(s1=12)
    executor.begin(step_plan(2))
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, prompt(12))
    planner.step(s1=12)
    assert planner.run(1, 4) == expected


@pytest.mark.parametrize("kv_memory", ["paged", "virtual"])
def test_steps_larger_than_the_buffers_get_larger_ones(
    make_worker: MakeWorker, kv_memory: str
) -> None:
    worker = make_worker("llama", block_size=16, num_blocks=512, kv_memory=kv_memory)
    planner = Planner(worker.executor)
    lengths = dict.fromkeys(range(1, 12), 400)
    for handle, length in lengths.items():
        planner.admit(handle, prompt(length, handle % 3))
    planner.step(**{f"s{handle}": length for handle, length in lengths.items()})
    planner.step()
    found = np.array([planner.run(handle, 5)[:5] for handle in lengths])
    for rest in range(3):
        group = found[[handle % 3 == rest for handle in lengths]]
        assert (group == group[0]).all()
