"""A scheduler core and a worker without a model, recorded during random events."""

from collections import deque
from pathlib import Path

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import FileRecorder
from shared.bus.api import START, Entry, EntryId
from shared.codec import Message, encode
from shared.messages.plans import StepPlan
from shared.messages.requests import Abort
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
        self.num_entries = {"outputs": 0, "requests": 0}

    def give(self, log: str, message: Message) -> None:
        self.num_entries[log] += 1
        entry = Entry(EntryId(5, self.num_entries[log]), (encode(message),))
        self.recorder.entry(log, entry)
        for answer in self.core.apply(message, entry.id):
            self.give("outputs", answer)

    def schedule(self) -> None:
        while (plan := self.core.schedule(sum(self.num_entries.values()))) is not None:
            self.recorder.plan(EntryId(5, plan.step), encode(plan))
            self.plans.append(plan)

    def execute(self) -> None:
        if self.plans:
            self.give("outputs", self.worker.execute(self.plans.popleft()))


def record(path: Path, seed: int) -> None:
    """Submit and abort requests, and pin prefixes, also while plans are in flight."""
    engine = Recorded(path)
    rng = np.random.default_rng(seed)
    for number in range(150):
        # As in the service, outputs are applied before requests.
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
