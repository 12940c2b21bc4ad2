"""Choices that end while their group is being computed again."""

from collections import deque

import numpy as np
import pytest

from scheduler_svc.core import events
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.messages.outputs import ChoiceEnded
from shared.messages.plans import StepPlan
from shared.messages.requests import Stop
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit


@pytest.mark.parametrize("num_steps_before", range(1, 6))
@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_choice_may_end_while_all_of_its_group_are_computed_again(
    num_steps_before: int, choice: int, prefix_caching: bool
) -> None:
    """The others do without the prompt blocks that it was to fill for all of them."""
    config = SchedulerConfig(16, 4, 64, 4, 5, 1, 0, 100, prefix_caching=prefix_caching)
    core = Scheduler(config)
    worker = FakeWorker(4, 5, lambda handle, position: (handle * 100 + position, False))
    generated = [np.array([5, number], np.int32) for number in range(3)]
    asked = submit("r0", range(18), max_tokens=6, num_choices=3)
    core.recover(asked, dict(enumerate(generated)), {})
    plans: deque[StepPlan] = deque()
    entries = 0
    while (plan := core.schedule(0)) is not None or plans:
        if plan is not None:
            plans.append(plan)
            continue
        entries += 1
        core.apply(worker.execute(plans.popleft()), EntryId(1, entries))
        if entries == num_steps_before:
            [answer] = core.apply(Stop("r0", choice, 2), EntryId(1, entries))
            assert isinstance(answer, ChoiceEnded)
    [ended] = [event for event in core.take_events() if isinstance(event, events.Ended)]
    assert ended.num_generated == 2 * 6 + 2
    assert core.pool.num_used == 0
