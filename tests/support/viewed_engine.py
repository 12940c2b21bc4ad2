"""A scheduler core with a worker, whose logs readers of its state can follow."""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import Entry, EntryId
from shared.codec import Message, encode
from shared.messages.plans import EpochStarted, StepPlan
from tests.support.fake_worker import FakeWorker

_STEP_MS = 10


class ViewedEngine:
    """One epoch.

    Attributes:
        plans, outputs, snapshots: entries of the logs.
    """

    def __init__(self, epoch: int = 1_000, **changes: Any) -> None:
        values: dict[str, Any] = {
            "num_blocks": 24,
            "block_size": 4,
            "max_model_len": 80,
            "max_num_sequences": 12,
            "max_num_batched_tokens": 48,
            "max_plans_in_flight": 2,
            "num_watermark_blocks": 0,
            "outputs_retention": 10_000,
            "num_host_blocks": 16,
            **changes,
        }
        self.epoch = epoch
        self.config = SchedulerConfig(**values)
        self.core = Scheduler(self.config)
        self.core.start(EntryId(epoch, 0))
        self.plans: list[Entry] = []
        self.outputs: list[Entry] = []
        self.snapshots: list[Entry] = []
        self.now_ms = epoch
        self._worker = FakeWorker(
            self.config.block_size,
            self.config.max_num_batched_tokens,
            lambda handle, place: ((handle + place * 3) % 97 + 1, (handle + place) % 31 == 0),
        )
        self._in_flight: deque[StepPlan] = deque()
        self._unread: list[tuple[EntryId, list[Message]]] = []
        started = EpochStarted(epoch, "scheduler", ("worker",), np.empty(0, np.int32), str(epoch))
        self._append(self.plans, [started])
        self._append(self.outputs, [started])

    def ask(self, *messages: Message) -> None:
        """Apply messages of gateways."""
        answers = [a for m in messages for a in self.core.apply(m, EntryId(self.now_ms, 1))]
        if answers:  # plans are made before the scheduler has read them
            self._unread.append((self._append(self.outputs, answers), answers))

    def step(self) -> bool:
        """Plan, and execute the oldest plan; whether there was one."""
        self.plan()
        if not self._in_flight:
            return False
        self.now_ms += _STEP_MS
        result = self._worker.execute(self._in_flight.popleft())
        result = replace(result, step_us=1_000 * _STEP_MS)
        self._write([result])
        self.plan()
        return True

    def plan(self) -> None:
        """Plan as far ahead as the scheduler does."""
        while (plan := self.core.schedule(self.now_ms)) is not None:
            self._in_flight.append(plan)
            self.plans.append(Entry(EntryId(self.epoch, plan.step), (encode(plan),)))
        if answers := self.core.take_answers():
            self._write(answers)

    def snapshot(self) -> Entry:
        """Write a snapshot."""
        at = EntryId(self.epoch, self.now_ms - self.epoch + 1)
        entry = Entry(at, (encode(self.core.snapshot()),))
        self.snapshots.append(entry)
        return entry

    def _write(self, messages: list[Any]) -> None:
        """Append to outputs and apply, as the service does when it has read them."""
        if messages:
            self._unread.append((self._append(self.outputs, messages), messages))
        while self._unread:
            at, read = self._unread.pop(0)
            answers = [answer for message in read for answer in self.core.apply(message, at)]
            if answers:
                self._unread.append((self._append(self.outputs, answers), answers))

    def _append(self, log: list[Entry], messages: list[Message]) -> EntryId:
        at = EntryId(self.epoch, len(log))
        log.append(Entry(at, tuple(map(encode, messages))))
        return at
