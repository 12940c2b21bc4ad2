"""The host pool's blocks do not change hands within a plan."""

import pytest

from scheduler_svc.core import events
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

NUM_BLOCKS = 9
SMALL = 2  # blocks of the latest request when it goes


@pytest.mark.parametrize(("num_host_blocks", "kind"), [(6, "recompute"), (7, "swap"), (20, "swap")])
def test_a_swapped_group_stays_out_while_others_are_swapped_out(
    num_host_blocks: int, kind: str
) -> None:
    """Even if it would fit where those were: they come before it, once there is room for all.

    So no plan brings back what is in a host block, and fills that with something else.
    """
    config = SchedulerConfig(
        NUM_BLOCKS, 4, 64, 4, 32, 1, 0, 100, num_host_blocks=num_host_blocks, preemption="swap"
    )
    core = Scheduler(config)
    worker = FakeWorker(4, 32, lambda handle, position: (handle * 100 + position, False))
    core.apply(submit("first", range(4), max_tokens=30), EntryId(1, 1))
    core.apply(submit("large", range(100, 110), max_tokens=24), EntryId(1, 2))
    core.apply(submit("small", range(200, 204), max_tokens=8), EntryId(1, 3))
    went: list[str] = []
    came: list[str] = []
    could_have_come = False
    while (plan := core.schedule(0)) is not None:
        assert not len(plan.swap_out_host) or not len(plan.swap_in_host)
        for event in core.take_events():
            if isinstance(event, events.Preempted):
                assert event.kind == (kind if event.request_id == "large" else "swap")
                could_have_come |= "small" in went and core.pool.num_free > SMALL
                went.append(event.request_id)
            elif isinstance(event, events.Admitted) and event.again:
                came.append(event.request_id)
        core.apply(worker.execute(plan), EntryId(1, 3 + plan.step))
    assert (went, came) == (["small", "large"], ["large", "small"])
    assert could_have_come
    assert core.host_pool.num_used == 0
