"""Metrics of tenants: tokens by kind, and blocks over time."""

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observer import Observer
from shared.bus.api import EntryId
from shared.messages.leases import KVGeometry
from shared.metrics import SchedulerMetrics
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

BLOCK_SIZE = 4


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _metric(metrics: SchedulerMetrics, name: str) -> dict[str, float]:
    """Values of a metric, by the labels that are not the same everywhere."""
    found: dict[str, float] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == f"pagestream:{name}_total":
                labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                found[" ".join(labels)] = sample.value
    return found


def test_tokens_and_block_seconds_are_counted_for_each_tenant() -> None:
    metrics, clock = SchedulerMetrics("model", "engine"), Clock()
    observer = Observer(metrics, clock)
    core = Scheduler(SchedulerConfig(50, BLOCK_SIZE, 128, 8, 64, 1, 0, 100, fair_queueing=True))
    worker = FakeWorker(BLOCK_SIZE, 64, lambda handle, position: (position, False))
    kv = KVGeometry(50, BLOCK_SIZE, 64, 0)
    entry = 0
    observer.gauges(core, kv)
    for name, tenant, prompt in (
        ("a", "alice", range(9)),
        ("b", "bob", range(20, 40)),
        ("c", "alice", range(9)),
    ):
        entry += 1
        core.apply(submit(name, prompt, tenant=tenant, max_tokens=3), EntryId(1, entry))
        while (plan := core.schedule(0)) is not None:
            observer.noted(core.take_events())
            clock.now_s += 1.0
            observer.gauges(core, kv)
            entry += 1
            core.apply(worker.execute(plan), EntryId(1, entry))
        observer.noted(core.take_events())
    # Two full blocks of alice's second prompt are those of the first.
    assert _metric(metrics, "tenant_tokens") == {
        "alice computed": 9 + 1,
        "alice cached": 8,
        "alice generated": 6,
        "bob computed": 20,
        "bob generated": 3,
    }
    # Three steps of a second each, with three blocks for 9 to 11 tokens, 5 and 6 for 20 to 22.
    assert _metric(metrics, "tenant_block_seconds") == {"alice": 18.0, "bob": 17.0}
    assert np.isclose(clock.now_s, 9.0)
