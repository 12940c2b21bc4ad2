"""The ledger of an outputs log is equal to the metrics of the same run."""

import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.explain.merged_logs import LoggedMessage
from scheduler_svc.observer import Observer
from scheduler_svc.usage.ledger import Ledger, Usage
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.leases import KVGeometry
from shared.messages.plans import EpochStarted, StepPlan
from shared.metrics import SchedulerMetrics
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit
from tests.support.walks.recorded import record

BLOCK_SIZE = 4
STEP_S = 0.5
KINDS = ("computed", "cached", "generated", "recomputed")


class Run:
    """A core with metrics, whose outputs are kept. A step takes half a second."""

    def __init__(self, num_blocks: int) -> None:
        self.metrics, self.now_s = SchedulerMetrics("model", "engine"), 0.0
        self.observer = Observer(self.metrics, lambda: self.now_s)
        self.core = Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE, 128, 8, 64, 1, 0, 100))
        self.worker = FakeWorker(BLOCK_SIZE, 64, lambda handle, position: (position, False))
        self.kv = KVGeometry(num_blocks, BLOCK_SIZE, 64, 0)
        self.outputs = [LoggedMessage(EntryId(1, 0), EpochStarted(1, "s", ("w",)))]
        self.observer.gauges(self.core, self.kv)
        self.num_entries = 0

    def give(self, message: Message) -> None:
        self.num_entries += 1
        for answer in self.core.apply(message, EntryId(1, self.num_entries)):
            self._log(answer)

    def finish(self) -> None:
        plans: deque[StepPlan] = deque()
        while True:
            while (plan := self.core.schedule(0)) is not None:
                plans.append(plan)
            for answer in self.core.take_answers():
                self._log(answer)
            self.observer.noted(self.core.take_events())
            if not plans:
                return
            self.now_s += STEP_S
            self.observer.gauges(self.core, self.kv)
            result = self.worker.execute(plans.popleft())
            object.__setattr__(result, "step_us", int(STEP_S * 1e6))
            self._log(result)
            self.give(result)

    def _log(self, message: Message) -> None:
        self.outputs.append(LoggedMessage(EntryId(1, len(self.outputs)), message))

    def metric(self, name: str, *labels: str) -> float:
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == f"pagestream:{name}_total":
                    found = [v for k, v in sample.labels.items() if k in ("tenant", "kind")]
                    if sorted(found) == sorted(labels):
                        return sample.value
        return 0.0


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_the_ledger_is_equal_to_the_metrics_with_preemptions_too(num_blocks: int) -> None:
    run = Run(num_blocks)
    rng = np.random.default_rng(num_blocks)
    for number in range(12):
        tenant = ("alice", "bob", "carol")[number % 3]
        prompt = range(10 * (number % 4) + 1, 10 * (number % 4) + int(rng.integers(8, 30)))
        asked = {"max_tokens": int(rng.integers(4, 24)), "num_choices": 1 + number % 2}
        run.give(submit(f"r{number}", prompt, tenant=tenant, **asked))
    run.finish()
    ledger = Ledger(BLOCK_SIZE)
    ledger.read(run.outputs)
    assert set(ledger.by_tenant) == {"alice", "bob", "carol"}
    for tenant, usage in ledger.by_tenant.items():
        assert usage.requests == 4
        counted = {kind: run.metric("tenant_tokens", tenant, kind) for kind in KINDS}
        assert {kind: getattr(usage, kind) for kind in KINDS} == counted
        assert usage.block_seconds == pytest.approx(
            run.metric("tenant_block_seconds", tenant), rel=0.05
        )
    total = Usage()
    for usage in ledger.by_tenant.values():
        total.add(usage)
    assert (total.recomputed > 0) == (num_blocks == 24)
    assert total.cached > 0


def test_a_missing_entry_is_one_place_and_a_trimmed_beginning_is_none() -> None:
    run = Run(200)
    run.give(submit("r", range(8), max_tokens=20))
    run.finish()
    for outputs, num_gaps in (
        (run.outputs, 0),
        (run.outputs[5:], 0),
        (run.outputs[:5] + run.outputs[6:], 1),
        (run.outputs[5:9] + run.outputs[11:15] + run.outputs[16:], 2),
    ):
        ledger = Ledger(BLOCK_SIZE)
        ledger.read(outputs)
        assert ledger.num_gaps == num_gaps


def test_a_recording_is_added_up_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, seed=3)
    once, twice = (
        json.loads(usage_command("--json", "--recording", *files).stdout)["keys"][""]
        for files in ([str(path)], [str(path), str(path)])
    )
    assert once["requests"] > 50
    assert once["generated"] > 0
    assert twice == {name: pytest.approx(2 * value) for name, value in once.items()}
    header, row, total = usage_command("--recording", str(path)).stdout.splitlines()[:3]
    assert header.split()[1:] == [name.replace("_", "-") for name in once]
    assert row.split()[-2:] == total.split()[-2:]


def test_a_recording_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    found = usage_command("--recording", str(tmp_path / "none"))
    assert found.returncode == 1
    assert "none" in found.stderr


def usage_command(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "scheduler_svc.usage", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)
