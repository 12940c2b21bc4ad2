"""Merges the three logs of an engine into one order, for the timeline of one request. Pure.

The order is that of ``outputs``. A command of ``requests`` comes before the first entry that names
a later cursor. A plan comes right before its result, behind the answers of the same tick.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.explain.entry_times import Clock
from scheduler_svc.explain.request_commands import RequestCommands
from scheduler_svc.explain.request_tracker import RequestTracker
from scheduler_svc.explain.timeline import Timeline
from shared.bus.api import EntryId
from shared.codec import Message
from shared.errors import PageStreamError
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.outputs_log.reader import OutputsReader, requests_cursor_of


class RequestNotFound(PageStreamError):
    """The logs have no request of this id, or several whose ids begin so."""


class LoggedMessage(NamedTuple):
    """One message, with the id of its entry."""

    at: EntryId
    message: Message


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of this epoch."""

    epoch: int
    plan: StepPlan


@dataclass(slots=True)
class Logs:
    """What is left of an engine's logs, each in its order.

    Attributes:
        block_size: tokens in a block, if known.
        unknown: what is missing, in words.
    """

    requests: list[LoggedMessage] = field(default_factory=list)
    plans: list[Planned] = field(default_factory=list)
    outputs: list[LoggedMessage] = field(default_factory=list)
    block_size: int | None = None
    unknown: list[str] = field(default_factory=list)

    def request_ids(self) -> set[str]:
        """All requests that the logs name."""
        preempted = {
            found
            for planned in self.plans
            for preemption in planned.plan.preemptions
            for found in (preemption.request_id, preemption.by)
        }
        return preempted | {
            found
            for logged in (*self.requests, *self.outputs)
            if (found := _request_id(logged.message)) is not None
        }


def resolve(given: str, logs: Logs) -> str:
    """The one request whose id begins so, with or without the prefix that clients see.

    Raises:
        RequestNotFound: there is none, or there are several.
    """
    prefix = given.removeprefix("chat").removeprefix("cmpl-")
    found = sorted(known for known in logs.request_ids() if known.startswith(prefix))
    if prefix in found:
        return prefix
    if not found:
        raise RequestNotFound(f"nothing is known of a request {prefix!r}; {_extent(logs)}")
    if len(found) > 1:
        some = ", ".join(found[:5])
        raise RequestNotFound(f"{len(found)} requests begin with {prefix!r}, such as {some}")
    return found[0]


def timeline_of(request_id: str, logs: Logs) -> Timeline:
    """The timeline of a request, as far as the logs reach."""
    timeline = Timeline(request_id, unknown=list(logs.unknown))
    merger = _LogMerger(timeline, logs)
    for logged in logs.outputs:
        merger.take(logged)
    merger.finish()
    return timeline


class _LogMerger:
    def __init__(self, timeline: Timeline, logs: Logs) -> None:
        self._tracker = RequestTracker(timeline, logs.block_size)
        self._commands = RequestCommands(timeline, self._tracker)
        self._clock = Clock([planned.plan for planned in logs.plans])
        self._reader = OutputsReader()
        self._requests = deque(logs.requests)
        self._plans = deque(logs.plans)

    def take(self, logged: LoggedMessage) -> None:
        """Take the next message of outputs."""
        at, message = logged
        if isinstance(message, EpochStarted):
            self._plan_until(message.epoch, 0)
        elif isinstance(message, StepResult):
            self._plan_until(at.epoch, message.step)
        cursor = requests_cursor_of(message)
        if cursor is not None:
            self._apply_requests_until(cursor)
        when = self._clock.read(at, message, cursor)
        for event in self._reader.read_message(at, message):
            self._tracker.apply(event, when)

    def finish(self) -> None:
        """Take the plans without results and the commands without answers."""
        while self._plans:
            self._plan(self._plans.popleft())
        while self._requests:
            self._commands.take(*self._requests.popleft())
        self._tracker.close()

    def _plan_until(self, epoch: int, step: int) -> None:
        plans = self._plans
        while plans and (plans[0].epoch, plans[0].plan.step) <= (epoch, step):
            self._plan(plans.popleft())

    def _plan(self, planned: Planned) -> None:
        self._apply_requests_until(EntryId.parse(planned.plan.requests_cursor))
        self._clock.planned(planned.plan)
        self._tracker.plan(planned.plan)

    def _apply_requests_until(self, cursor: EntryId) -> None:
        while self._requests and self._requests[0].at <= cursor:
            self._commands.take(*self._requests.popleft())


def _request_id(message: Message) -> str | None:
    if isinstance(message, RequestState):
        return message.submit.request_id
    found = getattr(message, "request_id", None)
    return found if isinstance(found, str) else None


def _extent(logs: Logs) -> str:
    num_entries: Sequence[int] = (len(logs.requests), len(logs.outputs))
    if not any(num_entries):
        return "the logs are empty"
    gone = "; ".join(logs.unknown)
    named = f"the logs name {len(logs.request_ids())} requests"
    return f"{named}; {gone}" if gone else named
