"""A recording gives the same plans again, byte for byte."""

import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import BadRecording, FileRecorder
from scheduler_svc.replay import ReplayDiffers, replay
from shared.bus.api import START, Entry, EntryId
from shared.codec import Message, encode
from shared.messages import Abort, StepPlan
from tests.support.fake_worker import FakeWorker
from tests.support.requests import pin, submit

CONFIG = SchedulerConfig(40, 4, 128, 16, 48, 2, 1, 1_000, max_pinned_blocks=12)


def draw(handle: int, position: int) -> tuple[int, bool]:
    token = (handle * 31 + position * 17) % 97
    return token, token == 0


class Recorded:
    """An engine whose scheduler is recorded, with events in random order."""

    def __init__(self, path: Path) -> None:
        self.core = Scheduler(CONFIG)
        self.recorder = FileRecorder(path)
        self.recorder.epoch(EntryId(5, 0), CONFIG, START, [])
        self.core.outputs_cursor = EntryId(5, 0)
        self.worker = FakeWorker(CONFIG.block_size, CONFIG.max_num_batched_tokens, draw)
        self.plans: deque[StepPlan] = deque()
        self.num_entries = 0

    def give(self, log: str, message: Message) -> None:
        self.num_entries += 1
        entry = Entry(EntryId(5, self.num_entries), (encode(message),))
        self.recorder.entry(log, entry)
        self.core.apply(message, entry.id)

    def schedule(self) -> None:
        while (plan := self.core.schedule(self.num_entries)) is not None:
            self.recorder.plan(EntryId(5, plan.step), encode(plan))
            self.plans.append(plan)

    def execute(self) -> None:
        if self.plans:
            self.give("outputs", self.worker.execute(self.plans.popleft()))


def record(path: Path, seed: int) -> None:
    """Requests come, are aborted, and prefixes are pinned, also while plans are in flight."""
    engine = Recorded(path)
    rng = np.random.default_rng(seed)
    for number in range(150):
        # As in the service, a turn applies outputs before requests.
        if rng.random() < 0.6:
            engine.execute()
        if rng.random() < 0.5:
            first = number * 100
            prompt = range(first, first + int(rng.integers(1, 50)))
            engine.give(
                "requests",
                submit(
                    f"r{number}",
                    prompt,
                    max_tokens=int(rng.integers(1, 60)),
                    num_choices=int(rng.integers(1, 3)),
                ),
            )
        if rng.random() < 0.3:
            lately = int(rng.integers(max(0, number - 8), number + 1))
            engine.give("requests", Abort(f"r{lately}", "attachment", "gone"))
        if rng.random() < 0.2:
            first = int(rng.integers(number + 1)) * 100
            prefix = range(first, first + int(rng.integers(1, 30)))
            engine.give("requests", pin(f"{first}-{len(prefix)}", prefix))
        engine.schedule()
    while engine.plans:
        engine.execute()
        engine.schedule()
    engine.recorder.close()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    record(path, seed=3)
    return path


@pytest.mark.parametrize("seed", range(12))
def test_the_plans_are_the_same(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, seed)
    moments = list(replay(path))
    assert [moment.step for moment in moments] == list(range(1, len(moments) + 1))
    assert len(moments) > 100
    assert moments[-1].stats.num_running <= 1
    assert any(moment.stats.num_pinned_blocks for moment in moments)


def test_a_plan_that_differs_is_found(recording: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    # Another configuration must show in the plans.
    data = recording.read_bytes().replace(b"num_blocks\x28", b"num_blocks\x29", 1)
    assert data != recording.read_bytes()
    broken.write_bytes(data)
    with pytest.raises(ReplayDiffers, match="step"):
        list(replay(broken))


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nonsense"
    path.write_bytes(b"\xc1 nonsense")
    with pytest.raises(BadRecording):
        list(replay(path))


def test_the_command_prints_a_timeline(recording: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc.replay", str(recording)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "all as recorded" in done.stdout
    assert "preempted" in done.stdout


def test_an_idle_engine_that_is_sent_nonsense_collects_nothing() -> None:
    core = Scheduler(CONFIG)
    for number in range(1_000):
        core.apply(Abort("nobody", "attachment", "gone"), EntryId(5, number + 1))
        assert core.schedule(number) is None
    core.apply(submit("r0"), EntryId(5, 2_000))
    plan = core.schedule(2_000)
    assert plan is not None
    assert len(plan.idle_turns) == 1
