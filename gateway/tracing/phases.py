"""The phases of a request in the engine, with their times, from the outputs log.

All times are those at which this gateway read the log, by its own clock. A step began as long
before its result was read as it took. A sequence that decodes has a row in every result, so a
missing row is a preemption. One in the middle of a prefill shows only by the admission after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.engine.events import (
    ChoiceFinished,
    Event,
    RequestFailed,
    Superseded,
    TokensArrived,
)
from gateway.engine.open_requests import OpenRequests
from gateway.tracing.trace_context import TraceContext
from shared.messages.plans import EpochStarted
from shared.messages.requests import Submit
from shared.outputs_log.events import OutputsEvent, Step


class Phase(StrEnum):
    """What happens to a request."""

    QUEUE = "queue"  # from its Submit to its admission
    PREFILL = "prefill"  # from an admission to the first token of its step or of a later one
    DECODE = "decode"
    PREEMPTED = "preempted"  # until it is admitted again
    RECOVERED = "recovered"  # after a failure, from the last result on, until it is admitted again


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase that is over.

    Attributes:
        parent: the call of the request.
        engine_id: of the engine that computes it.
        model: its name.
        start_ns, end_ns: since 1970.
        error: why the request ended without its answer; "" otherwise.
    """

    parent: TraceContext
    engine_id: str
    model: str
    request_id: str
    phase: Phase
    start_ns: int
    end_ns: int
    facts: Mapping[str, int | bool | str]
    error: str = ""


@dataclass(slots=True)
class _Followed:
    """One request, and the phase that it is in."""

    parent: TraceContext
    phase: Phase
    since_ns: int
    step: int = 0  # of its admission in this phase
    num_tokens: int = 0  # generated in this phase
    facts: dict[str, int | bool | str] = field(default_factory=dict)


class PhaseTracker:
    """Follows the requests of traces that are recorded, at one engine. It does no I/O.

    Args:
        engine_id: of the engine, whose epochs and steps count.
        model: its name.
        report: takes each phase when it is over; must not block.
        clock_ns: nanoseconds since 1970.
    """

    def __init__(
        self,
        engine_id: str,
        model: str,
        report: Callable[[PhaseSpan], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._report = report
        self._clock_ns = clock_ns
        self._followed: dict[str, _Followed] = {}
        self._last_result_ns = 0

    def open(self, submit: Submit, is_known: bool) -> None:
        """Follow a request that is about to be sent to the engine.

        Args:
            is_known: the engine has accepted it before, from another delivery.
        """
        self.close(submit.request_id)
        parent = TraceContext.parse(submit.traceparent)
        if parent is not None and parent.is_sampled:
            phase = Phase.RECOVERED if is_known else Phase.QUEUE
            self._followed[submit.request_id] = _Followed(parent, phase, self._clock_ns())

    def close(self, request_id: str, error: str = "") -> None:
        """End the phase of a request, and follow it no more."""
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._end(request_id, followed, self._clock_ns(), error)

    def admitted(self, step: Step, requests: OpenRequests) -> None:
        """Take the admissions of a step, before anything else of its result."""
        if not self._followed:
            return
        start_ns = self._start_of(step)
        for handle, num_computed in step.admissions():
            request = requests.request_of(handle)
            if request is None:
                continue
            request_id = request.choices[0].request_id
            followed = self._followed.get(request_id)
            if followed is None or followed.step == step.result.step:
                continue  # one of several choices
            is_again = followed.phase is not Phase.QUEUE
            self._enter(request_id, followed, Phase.PREFILL, start_ns)
            followed.step = step.result.step
            followed.facts = {"cached_tokens": num_computed, "again": is_again}

    def apply(self, event: OutputsEvent, made: Sequence[Event], requests: OpenRequests) -> None:
        """Take an event of the outputs log.

        Args:
            made: the events of open requests that follow from it.
        """
        if not self._followed:
            return
        now_ns = self._clock_ns()
        if isinstance(event, Step):
            self._on_step(event, made, requests, now_ns)
        elif isinstance(event, EpochStarted):
            for request_id in self._followed:
                self.lost(request_id)
        for new in made:
            if isinstance(new, RequestFailed):
                self.close(new.request_id, new.error)
            elif isinstance(new, Superseded):
                self.close(new.request_id, "another call delivers the rest")
            elif isinstance(new, ChoiceFinished):
                request = requests.find(new.request_id)
                if request is None or request.has_ended:
                    self.close(new.request_id)

    def lost(self, request_id: str) -> None:
        """What was computed of the request may be lost."""
        followed = self._followed.get(request_id)
        if followed is None or followed.phase in (Phase.QUEUE, Phase.RECOVERED):
            return
        since_ns = self._last_result_ns
        if followed.phase is Phase.PREEMPTED:
            since_ns = self._clock_ns()
        self._enter(request_id, followed, Phase.RECOVERED, since_ns)

    def _on_step(
        self, step: Step, made: Sequence[Event], requests: OpenRequests, now_ns: int
    ) -> None:
        start_ns = self._start_of(step)
        computed: set[str] = set()
        for new in made:
            if isinstance(new, TokensArrived):
                self._sampled(new.request_id, start_ns, now_ns)
                computed.add(new.request_id)
        for beams in step.result.beams:
            search = requests.request_of(beams.group)
            if search is not None:
                self._sampled(search.choices[0].request_id, start_ns, now_ns)
                computed.add(search.choices[0].request_id)
        for request_id, followed in self._followed.items():
            if followed.phase is Phase.DECODE and request_id not in computed:
                self._enter(request_id, followed, Phase.PREEMPTED, start_ns)
        self._last_result_ns = now_ns

    def _sampled(self, request_id: str, start_ns: int, now_ns: int) -> None:
        """A step gave the request a token."""
        followed = self._followed.get(request_id)
        if followed is None:
            return
        if followed.phase is not Phase.DECODE:
            is_prefill = followed.phase is Phase.PREFILL
            self._enter(request_id, followed, Phase.DECODE, now_ns if is_prefill else start_ns)
        followed.num_tokens += 1

    def _enter(self, request_id: str, followed: _Followed, phase: Phase, at_ns: int) -> None:
        self._end(request_id, followed, at_ns)
        followed.phase, followed.since_ns = phase, max(at_ns, followed.since_ns)
        followed.step = followed.num_tokens = 0
        followed.facts = {}

    def _end(self, request_id: str, followed: _Followed, at_ns: int, error: str = "") -> None:
        facts = followed.facts
        if followed.phase is Phase.DECODE:
            facts = facts | {"tokens": followed.num_tokens}
        since_ns = followed.since_ns
        end_ns = max(at_ns, since_ns)
        self._report(
            PhaseSpan(
                followed.parent,
                self._engine_id,
                self._model,
                request_id,
                followed.phase,
                since_ns,
                end_ns,
                facts,
                error,
            )
        )

    def _start_of(self, step: Step) -> int:
        return self._clock_ns() - 1_000 * step.result.step_us
