"""How much of prompts a step takes: little while others decode, all that fits otherwise."""

from collections.abc import Iterator

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.messages.plans import StepPlan
from shared.sampling import BeamParams, EarlyStopping
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit


def make(max_prompt_tokens: int = 0, enough_prompt_tokens: int = 0) -> Scheduler:
    values = {"num_blocks": 200, "block_size": 4, "max_model_len": 200, "outputs_retention": 100}
    return Scheduler(
        SchedulerConfig(
            **values,
            max_num_sequences=16,
            max_num_batched_tokens=64,
            max_plans_in_flight=1,
            num_watermark_blocks=0,
            max_prompt_tokens=max_prompt_tokens,
            enough_prompt_tokens=enough_prompt_tokens,
        )
    )


def submit_prompts(core: Scheduler, *lengths: int) -> None:
    """Unlike prompts, each of a request that wants one token."""
    for number, length in enumerate(lengths):
        prompt = range(1000 * number, 1000 * number + length)
        core.apply(submit(f"r{number}", prompt, max_tokens=1), EntryId(1, 1 + number))


def plans(core: Scheduler, until: int) -> Iterator[StepPlan]:
    """What is planned, step by step, for a worker that never ends a sequence by itself."""
    worker = FakeWorker(4, 64, lambda handle, position: (handle * 100 + position, False))
    for number in range(until):
        plan = core.schedule(0)
        if plan is None:
            return
        yield plan
        core.apply(worker.execute(plan), EntryId(1, 10 + number))


@pytest.mark.parametrize(
    ("max_prompt_tokens", "expected"), [(0, [63, 27]), (20, [20, 20, 20, 20, 10]), (63, [63, 27])]
)
def test_a_prompt_is_cut_smaller_while_others_decode(
    max_prompt_tokens: int, expected: list[int]
) -> None:
    core = make(max_prompt_tokens)
    core.apply(submit("first", range(9), max_tokens=30), EntryId(1, 1))
    chunks = []
    for plan in plans(core, 9):
        chunks.append(int(plan.chunk_tokens.sum()))
        if plan.step == 2:
            core.apply(submit("long", range(100, 190), max_tokens=2), EntryId(1, 2))
    assert chunks[:2] == [9, 0]
    assert [chunk for chunk in chunks[2:] if chunk] == expected


def test_alone_a_prompt_takes_all_that_fits() -> None:
    core = make(20)
    core.apply(submit("long", range(100), max_tokens=2), EntryId(1, 1))
    assert [int(plan.chunk_tokens.sum()) for plan in plans(core, 2)] == [64, 36]


@pytest.mark.parametrize(
    ("enough", "expected"),
    [
        (0, [[20, 20, 12, 2]]),
        (1, [[20], [20], [12], [2]]),
        (30, [[20, 10], [10, 12, 2]]),
    ],
)
def test_prompts_that_fit_into_a_step_fill_it_only_as_far_as_is_enough(
    enough: int, expected: list[list[int]]
) -> None:
    core = make(enough_prompt_tokens=enough)
    submit_prompts(core, 20, 20, 12, 2)
    assert [plan.chunk_tokens.tolist() for plan in plans(core, 9)] == expected


def test_steps_are_filled_while_more_prompts_wait() -> None:
    core = make(enough_prompt_tokens=1)
    submit_prompts(core, 30, 30, 30, 12, 2)
    chunks = [plan.chunk_tokens.tolist() for plan in plans(core, 9)]
    assert chunks == [[30, 30, 4], [26], [12], [2]]


def test_the_first_prompt_of_a_step_takes_all_that_fits() -> None:
    core = make(enough_prompt_tokens=10)
    submit_prompts(core, 40, 9)
    assert [plan.chunk_tokens.tolist() for plan in plans(core, 9)] == [[40], [9]]


def test_beams_count_as_others() -> None:
    core = make(10)
    beams = BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    core.apply(submit("beams", range(9), num_choices=3, max_tokens=20, beams=beams), EntryId(1, 1))
    seen = []
    for plan in plans(core, 6):
        seen.append(sorted(plan.chunk_tokens.tolist()))
        if plan.step == 3:
            core.apply(submit("long", range(100, 130), max_tokens=2), EntryId(1, 2))
    assert seen[3] == [1, 1, 1, 10]


def test_choices_that_are_computed_again_end_together_however_little_fits() -> None:
    core = make(1)
    core.apply(submit("first", range(9), max_tokens=60), EntryId(1, 1))
    generated = {number: submit("x", [5, number]).prompt for number in range(3)}
    steps = iter(plans(core, 60))
    next(steps)
    core.recover(submit("r", range(6), max_tokens=6, num_choices=3), generated, {})
    for _ in steps:
        pass
    assert core.num_requests == 0
