"""A scheduler core with a worker and its outputs log, for tests of requests."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recovery import resume
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Attach, ChoiceView, Submit
from tests.support.fake_worker import FakeWorker
from tests.support.outputs_log import recovered
from tests.support.requests import submit


def token_at(position: int) -> int:
    return position * 3 + 1


class LoggedCore:
    """A core, a worker, and the outputs log as a gateway reads it."""

    def __init__(self, **changes: int) -> None:
        values: dict[str, Any] = {
            "num_blocks": 64,
            "max_plans_in_flight": 2,
            "num_host_blocks": 0,
            **changes,
        }
        self.config = SchedulerConfig(
            block_size=4,
            max_model_len=200,
            max_num_sequences=16,
            max_num_batched_tokens=64,
            num_watermark_blocks=0,
            outputs_retention=1_000,
            **values,
        )
        self.log: list[Message] = []
        self.epoch = 0
        self.start_epoch()

    def start_epoch(self, suspects: Sequence[int] = ()) -> None:
        self.epoch += 1_000
        self.num_entries = 0
        found = np.array(suspects, np.int32)
        self.log.append(EpochStarted(self.epoch, "scheduler", ("worker",), found))
        recovery = recovered(self.log, self.config.max_model_len)
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(4, 64, lambda handle, position: (token_at(position), False))
        self.plans: deque[StepPlan] = deque()
        self.log += resume(self.core, recovery, EntryId(self.epoch, 0))

    def apply(self, message: Message) -> list[Message]:
        self.num_entries += 1
        if isinstance(message, StepResult):
            self.log.append(message)
        answers = self.core.apply(message, EntryId(self.epoch, self.num_entries))
        self.log += answers
        return answers

    def plan(self, now_ms: int = 0) -> None:
        while (plan := self.core.schedule(now_ms)) is not None:
            self.plans.append(plan)
        self.log += self.core.take_answers()

    def step(self, count: int = 1) -> None:
        """Apply results, and plan after each."""
        for _ in range(count):
            self.plan()
            self.apply(self.worker.execute(self.plans.popleft()))
            self.plan()

    def run(self) -> None:
        self.plan()
        while self.plans:
            self.step()

    def checkpoint(self) -> list[RequestState]:
        """Append the states that gateways wait for, as the service does."""
        states = self.core.checkpoints() if self.core.needs_checkpoint else []
        self.log += states
        for state in states:
            self.apply(state)
        return states

    def outputs(self, request_id: str) -> dict[int, list[int]]:
        """Tokens of each choice, read back from the whole log."""
        recovery = recovered(self.log, self.config.max_model_len)
        if (known := recovery.finished.find(request_id)) is not None:
            choices = known.choices
            return {number: found.output.tolist() for number, found in choices.items()}
        found = recovery.unfinished[request_id].outputs()
        return {number: output.tolist() for number, output in found.items()}


def view(*tokens: int, finish_reason: str = "") -> ChoiceView:
    return ChoiceView(np.array(tokens, np.int32), finish_reason)


def attach(
    request: Submit,
    *views: ChoiceView,
    attachment: str = "second",
    has_submit: bool = True,
    exact: bool = False,
    overtaken: tuple[str, ...] = (),
) -> Attach:
    """An Attach of another delivery, whose Submit lists the ``overtaken`` ones."""
    found = None
    if has_submit:
        found = replace(request, attachment=attachment, overtaken=overtaken)
    return Attach(request.request_id, "other", attachment, found, views, exact)


def expected(num_prompt: int, count: int) -> list[int]:
    return [token_at(position) for position in range(num_prompt, num_prompt + count)]


REQUEST = submit("r", range(5), max_tokens=12)


def without_prompt(message: Attach) -> Attach:
    assert message.submit is not None
    return replace(message, submit=message.submit.without_prompt())
