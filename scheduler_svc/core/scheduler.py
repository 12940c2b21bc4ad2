"""The scheduler core: applies messages of the logs, and makes the plans of steps.

Pure: no clock, no log, no Redis. The service passes it the messages that it has read, and appends
the messages that it returns. The same calls with the same arguments give the same plans. Which
request runs and which waits is decided in ``policy.py``.
"""

from collections.abc import Mapping, Sequence
from itertools import count

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.idle_ticks import IdleTicks
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest
from scheduler_svc.core.requests.endings import Endings
from scheduler_svc.core.requests.known_requests import NOT_KNOWN, Acceptance, KnownRequests
from scheduler_svc.core.requests.lifecycle import Requests
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.requests.request_states import Answers
from scheduler_svc.core.results import check_result, ended_in
from scheduler_svc.core.sequences.backlog import Deadlines
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.snapshot import take_snapshot
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.core.step.planner import StepPlanner
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages.checks import check
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.leases import PrefixStatus
from shared.messages.outputs import BeamCandidates, RequestState, StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Abort, Attach, Drain, GatewayLost, Pin, Stop, Submit
from shared.messages.snapshots import PoolSnapshot


class Scheduler:
    """Continuous batching over a paged pool: messages in, answers and plans out.

    `Requests` keeps requests from their submission to their end, `SchedulingPolicy` decides which
    of them compute in which step, and `StepPlanner` carries that out.
    """

    def __init__(self, config: SchedulerConfig, requests_cursor: EntryId = START) -> None:
        self.config = config
        self.outputs_cursor = START
        tables = BlockTables(config)
        self.pool = tables.pool
        self.host_pool = tables.host_pool
        self._tables = tables
        self._events: list[events.Event] = []
        self._prefixes = PinnedPrefixes(config, self.pool)
        self._retention = Retention(config.outputs_retention, config.outputs_retention_bytes)
        new_handle = count(1).__next__
        emit = self._events.append
        self._planner = StepPlanner(config, tables, self._prefixes, new_handle, emit)
        self._policy = SchedulingPolicy(config, self._planner)
        self._answers = Answers(self._planner, requests_cursor)
        self._known = KnownRequests(config.resume_window_ms, new_handle)
        deadlines = Deadlines(config.queue_ttl_ms)
        self._endings = Endings(
            self._known,
            deadlines,
            self._planner,
            self._prefixes,
            self._retention,
            self._answers,
            emit,
        )
        self._requests = Requests(
            config,
            self._known,
            deadlines,
            self._endings,
            self._planner,
            self._prefixes,
            self._retention,
            self._answers,
            emit,
        )
        self._timed_out: list[Message] = []
        self._idle_ticks = IdleTicks(requests_cursor)
        self._is_released = False  # the engine hands its requests over to others

    @property
    def requests_cursor(self) -> EntryId:
        """Last entry of ``requests`` that was applied."""
        return self._answers.cursor

    @property
    def planned_step(self) -> int:
        """Last step that was planned."""
        return self._planner.planned_step

    @property
    def applied_step(self) -> int:
        """Last step whose result was applied."""
        return self._planner.applied_step

    # ---------------------------------------------------------- applying messages

    def start(self, fence: EntryId) -> None:
        """Begin an epoch.

        Args:
            fence: its first entry of ``outputs``; the epoch's number is a time in milliseconds.
        """
        self.outputs_cursor = fence
        self._endings.end_overdue(fence.epoch)

    def recover(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray],
        ended: Mapping[int, EndedChoice],
        search: BeamSearch | None = None,
        num_deaths: int = 0,
        was_admitted: bool = False,
        accepted: Acceptance = NOT_KNOWN,
    ) -> list[Message]:
        """Accept an unfinished request of an earlier epoch; return what to append to ``outputs``.

        Args:
            outputs: generated tokens of each choice, or running beam, that has not ended.
            ended: the choices that have ended.
            search: instead of ``ended``, for a request with beams.
            num_deaths: number of workers in a row that died while they computed it.
            was_admitted: whether it was admitted before, even if no token came of it.
            accepted: when it was accepted; requests are recovered in the order of their arrival.
        """
        return self._requests.recover(
            submit, outputs, ended, search, num_deaths, was_admitted, accepted
        )

    def remember(self, request_id: str, ended: EndedRequest) -> None:
        """Remember a request that ended in an earlier epoch."""
        self._requests.remember(request_id, ended)

    def apply(self, message: Message, at: EntryId) -> list[Message]:
        """Apply one message of ``requests`` or ``outputs``; return what to append to ``outputs``.

        Args:
            at: id of the message's entry.

        Raises:
            ProtocolError: a result of no plan, or one that contradicts its plan.
            DecodeError: a message of ``requests`` has impossible values; nothing has changed.
        """
        match message:
            case StepResult():
                check_result(message, self.config.vocab_size)
                self.outputs_cursor = at
                ended = ended_in(message) if len(message.ended_rows) else ()
                return self.apply_result(
                    message.step, message.handles, message.tokens, ended, message.beams
                )
            case RequestState():
                self.outputs_cursor = at
                self._retention.read_prompt(message.prompt_bytes)
                group = self._known.by_request.get(message.submit.request_id)
                if group is not None and message.submit.attachment == group.submit.attachment:
                    self._retention.state_written(group, at, message.has_prompt)
                return []
            case Submit() | Attach() | Stop() | Abort() | GatewayLost() | Pin() | Drain():
                check(message, self.config.vocab_size)
                self._answers.cursor = at
                self._known.set_clock(at.epoch)
                return self._apply_request(message)
        self.outputs_cursor = at
        return []

    def read_outputs(self, at: EntryId, num_bytes: int) -> None:
        """Count an entry of ``outputs``; call it before the entry's messages are applied."""
        self._retention.read(at, num_bytes)

    def skip_request(self, at: EntryId) -> None:
        """Pass over an entry of ``requests`` that could not be decoded."""
        self._answers.cursor = at

    def _apply_request(self, message: Message) -> list[Message]:
        requests = self._requests
        match message:
            case Submit() | Attach() if self._is_released:
                return [self._answers.ended(message.request_id, FinishReason.RELEASED)]
            case Submit():
                return requests.submit(message)
            case Attach():
                return requests.attach(message)
            case Stop():
                return self._endings.stop(message)
            case Abort():
                return self._endings.abort(message)
            case GatewayLost():
                return self._endings.gateway_lost(message)
            case Pin():
                requests.pin(message)
            case Drain() if message.epoch == self.outputs_cursor.epoch:
                self._policy.is_draining = True
                self._is_released = message.hand_over
        return []

    def apply_result(
        self,
        step: int,
        handles: IntArray,
        tokens: IntArray,
        ended: Sequence[tuple[int, EndFlag]],
        beams: Sequence[BeamCandidates],
    ) -> list[Message]:
        """Apply a result that is not packed into a StepResult; return what ``apply`` returns.

        Args:
            step: the step that it is the result of.
            handles: [n] sequences that sampled.
            tokens: [n] one for each of them.
            ended: handles of sequences whose token is their last, each with the reason.
            beams: candidates, one for each BeamStep of the plan.

        Raises:
            ProtocolError: a result of no plan.
        """
        done = self._planner.apply(step, handles, tokens, beams)
        failed = [found for each in ended for found in self._endings.end_flagged(*each)]
        return failed + [self._endings.finish_search(group) for group in done]

    # ------------------------------------------------------------------ planning

    def schedule(self, now_ms: int) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute or enough plans are in flight.

        Requests that ended by their deadlines are answered by ``take_answers``.

        Args:
            now_ms: the engine's clock.
        """
        draft = self.draft(now_ms)
        if draft is None:
            return None
        cursors = (self.requests_cursor, self.outputs_cursor, self.outputs_min_id)
        return draft.finish(now_ms, *cursors, self._idle_ticks.take())

    def draft(self, now_ms: int) -> PlanDraft | None:
        """The same as ``schedule``, but not packed into a message."""
        if self._planner.is_full:
            if self.requests_cursor != self._idle_ticks.cursor:
                self._record_idle_tick(now_ms)  # requests were applied before the next results
            return None
        self._timed_out += self._endings.end_overdue(now_ms)
        if self._is_released:
            if self.applied_step == self.planned_step:  # no token of any request follows
                self._timed_out += self._endings.release_all()
            self._record_idle_tick(now_ms)
            return None
        draft = self._planner.new_draft()
        is_planned = self._policy.schedule(draft)
        for group, sequence in draft.dropped:
            self._endings.remove_dropped(group, sequence)
        if not is_planned:
            self._record_idle_tick(now_ms)
            return None
        self._planner.planned_step = draft.step
        self._idle_ticks.planned(self.requests_cursor)
        draft.retired, self._tables.retired = self._tables.retired, []
        return draft

    def take_answers(self) -> list[Message]:
        """Messages to append to ``outputs`` before the plans made since the last call."""
        taken, self._timed_out = self._timed_out, []
        return taken

    def _record_idle_tick(self, now_ms: int) -> None:
        is_empty = not len(self._known.by_request)
        self._idle_ticks.record(now_ms, self.requests_cursor, self.outputs_cursor, is_empty)

    # -------------------------------------------------------- the outputs log

    def checkpoints(self, is_pressed: bool = False) -> list[RequestState]:
        """Fresh RequestStates of requests whose old ones keep the outputs log from being trimmed,
        or that another gateway delivers now.

        They are valid only right behind ``outputs_cursor``: append them with exactly the next id.

        Args:
            is_pressed: whether the log should become as short as it can.
        """
        retention, head = self._retention, self.outputs_cursor
        return [
            self._answers.state(found, retention.needs_prompt(found, head, is_pressed))
            for found in retention.overdue(head, is_pressed)
        ]

    @property
    def outputs_needed_id(self) -> EntryId:
        """Only slow readers need entries of ``outputs`` below this one."""
        return self._retention.needed_id(self.outputs_cursor)

    @property
    def outputs_min_id(self) -> EntryId:
        """Entries of ``outputs`` below may be trimmed, as far as this epoch's entries decide."""
        return self._retention.min_id(self.outputs_cursor)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a gateway waits for a RequestState, or an old one prevents trimming."""
        return self._retention.needs_states(self.outputs_cursor)

    @property
    def outputs_bytes_left(self) -> int:
        """Bytes of the outputs log that are left for entries of earlier epochs."""
        return self._retention.bytes_left

    def find(self, request_id: str) -> SequenceGroup | None:
        """A request that has not ended, or None."""
        return self._known.by_request.get(request_id)

    def state_of(self, group: SequenceGroup) -> RequestState:
        """All that a recovery needs of an unfinished request."""
        return self._answers.state(group)

    def suspects(self) -> list[int]:
        """Handles that the worker is computing; if it has died, one of them may be the cause."""
        return self._planner.suspects()

    def gateways(self) -> set[str]:
        """Instances that deliver unfinished requests."""
        return {group.submit.gateway for group in self._known.by_request.values()} - {""}

    # -------------------------------------------------------------- inspection

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._known.by_request)

    @property
    def has_work(self) -> bool:
        """Whether a client's request is running, preempted or waiting."""
        return self.has_running or len(self._planner.queues.backlog) > 0

    @property
    def hands_over(self) -> bool:
        """Whether the engine releases its requests, and all that come, for other engines."""
        return self._is_released

    @property
    def is_draining(self) -> bool:
        """Whether waiting requests are not admitted any more."""
        return self._policy.is_draining

    @property
    def has_running(self) -> bool:
        """Whether a request is running or preempted."""
        queues = self._planner.queues
        return bool(queues.running or queues.preempted)

    @property
    def running(self) -> Sequence[SequenceGroup]:
        """Groups that hold blocks, by rank."""
        return self._planner.queues.running

    def take_events(self) -> list[events.Event]:
        """Events since the last call, for logs and metrics."""
        taken = self._events.copy()
        self._events.clear()
        return taken + self._prefixes.take_events()

    def prefixes(self) -> tuple[PrefixStatus, ...]:
        """The status of each Pin; one that is missing here should be sent again."""
        return self._prefixes.statuses()

    def stats(self) -> events.Stats:
        """State of queues and pool; visits every running sequence."""
        queues = self._planner.queues
        return events.collect(
            self.pool,
            self.config.block_size,
            queues.running,
            num_waiting=queues.num_waiting + len(queues.preempted),
            num_waiting_tokens=queues.num_waiting_tokens,
            num_swapped=sum(group.is_swapped for group in queues.preempted),
            num_pinned_prefixes=len(self._prefixes),
            step=self.planned_step,
        )

    def snapshot(self) -> PoolSnapshot:
        """The state of pool and requests; visits every running sequence and cached block."""
        return take_snapshot(
            self.config,
            self.pool,
            self._known.by_request.values(),
            self._planner.queues.num_waiting,
            self.planned_step,
            self.applied_step,
            self.outputs_cursor,
        )
