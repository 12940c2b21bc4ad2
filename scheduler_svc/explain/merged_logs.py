"""The three logs of an engine, put into one order and told from one request's point of view. Pure.

``outputs`` is the spine. What gateways said comes before the first entry that names a later
cursor; a plan right before its result, so that the answers of the same turn come first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.events import Preempted
from scheduler_svc.explain.entry_times import Clock
from scheduler_svc.explain.request_commands import Asked
from scheduler_svc.explain.story import Story
from scheduler_svc.explain.timeline import Chronicle
from shared.bus.api import EntryId
from shared.codec import Message
from shared.errors import PageStreamError
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan


class RequestNotFound(PageStreamError):
    """Nothing is known of the id, or it is the beginning of several."""


class Said(NamedTuple):
    """One message, with the id of its entry."""

    at: EntryId
    message: Message


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of this epoch."""

    epoch: int
    plan: StepPlan
    preemptions: tuple[Preempted, ...] | None = None  # None: it was not replayed


@dataclass(slots=True)
class Logs:
    """What is left of an engine's logs, each in its order.

    Attributes:
        block_size: tokens in a block, if known.
        unknown: what is missing, in words.
    """

    requests: list[Said] = field(default_factory=list)
    plans: list[Planned] = field(default_factory=list)
    outputs: list[Said] = field(default_factory=list)
    block_size: int | None = None
    unknown: list[str] = field(default_factory=list)

    def request_ids(self) -> set[str]:
        """All requests that the logs name."""
        return {
            found
            for said in (*self.requests, *self.outputs)
            if (found := _request_id(said.message)) is not None
        }


def resolve(given: str, logs: Logs) -> str:
    """The one request whose id begins so, with or without the word that clients see before it.

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


def tell(request_id: str, logs: Logs) -> Story:
    """A request's life, as far as the logs go."""
    story = Story(request_id, unknown=list(logs.unknown))
    teller = _Teller(story, logs)
    for said in logs.outputs:
        teller.take(said)
    teller.finish()
    return story


class _Teller:
    def __init__(self, story: Story, logs: Logs) -> None:
        self._chronicle = Chronicle(story, logs.block_size)
        self._asked = Asked(story, self._chronicle)
        self._clock = Clock([planned.plan for planned in logs.plans])
        self._requests = deque(logs.requests)
        self._plans = deque(logs.plans)
        self._story = story
        self._replayed = bool(logs.plans) and all(p.preemptions is not None for p in logs.plans)

    def take(self, said: Said) -> None:
        """The next message of outputs."""
        at, message = said
        if isinstance(message, EpochStarted):
            self._plan_until(message.epoch, 0)
        elif isinstance(message, StepResult):
            self._plan_until(at.epoch, message.step)
        cursor = _requests_cursor(message)
        if cursor is not None:
            self._ask_until(cursor)
        when = self._clock.read(at, message, cursor)
        chronicle = self._chronicle
        match message:
            case EpochStarted():
                chronicle.epoch(message, when)
            case RequestState():
                chronicle.state(message, when)
            case StepResult():
                chronicle.result(message, when)
            case ChoiceEnded():
                chronicle.choice_ended(message, when)
            case RequestEnded():
                chronicle.request_ended(message, when)
            case BeamsEnded():
                chronicle.beams_ended(message, when)

    def finish(self) -> None:
        """Plans without results, and requests without answers."""
        while self._plans:
            self._plan(self._plans.popleft())
        while self._requests:
            self._asked.take(*self._requests.popleft())
        self._chronicle.close(self._replayed)

    def _plan_until(self, epoch: int, step: int) -> None:
        plans = self._plans
        while plans and (plans[0].epoch, plans[0].plan.step) <= (epoch, step):
            self._plan(plans.popleft())

    def _plan(self, planned: Planned) -> None:
        self._ask_until(EntryId.parse(planned.plan.requests_cursor))
        self._clock.planned(planned.plan)
        self._chronicle.plan(planned.plan, planned.preemptions)

    def _ask_until(self, cursor: EntryId) -> None:
        while self._requests and self._requests[0].at <= cursor:
            self._asked.take(*self._requests.popleft())


def _request_id(message: Message) -> str | None:
    if isinstance(message, RequestState):
        return message.submit.request_id
    found = getattr(message, "request_id", None)
    return found if isinstance(found, str) else None


def _requests_cursor(message: Message) -> EntryId | None:
    found = getattr(message, "requests_cursor", None)
    return EntryId.parse(found) if isinstance(found, str) else None


def _extent(logs: Logs) -> str:
    num_entries: Sequence[int] = (len(logs.requests), len(logs.outputs))
    if not any(num_entries):
        return "the logs are empty"
    gone = "; ".join(logs.unknown)
    named = f"the logs name {len(logs.request_ids())} requests"
    return f"{named}; {gone}" if gone else named
