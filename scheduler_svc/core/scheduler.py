"""The scheduler core: who computes what next, on which blocks.

Pure: no clock, no log, no Redis. The service feeds it what it read, and publishes what it returns;
the same calls with the same arguments give the same plans.
"""

from collections.abc import Mapping, Sequence
from itertools import count

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import ProtocolError, SchedulerConfig
from scheduler_svc.core.message_checks import check
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest
from scheduler_svc.core.requests.lifecycle import NOT_KNOWN, Acceptance, Requests
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.requests.request_states import Answers
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.core.step.planner import StepPlanner
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.errors import DecodeError
from shared.messages.endings import EndFlag
from shared.messages.leases import PrefixStatus
from shared.messages.outputs import BeamCandidates, RequestState, StepResult
from shared.messages.plans import StepPlan, Turn
from shared.messages.requests import Abort, Attach, Drain, GatewayLost, Pin, Stop, Submit


class Scheduler:
    """Continuous batching over a paged pool: events in, answers and plans out.

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
        self._notes: list[events.Note] = []
        self._prefixes = PinnedPrefixes(config, self.pool)
        self._retention = Retention(config.outputs_retention, config.outputs_retention_bytes)
        new_handle = count(1).__next__
        self._planner = StepPlanner(config, tables, self._prefixes, new_handle, self._notes.append)
        self._policy = SchedulingPolicy(config, self._planner)
        self._answers = Answers(self._planner, requests_cursor)
        self._requests = Requests(
            config,
            self._planner,
            self._prefixes,
            self._retention,
            self._answers,
            new_handle,
            self._notes.append,
        )
        self._timed_out: list[Message] = []
        self._idle_turns: list[Turn] = []
        self._turn_cursor = requests_cursor  # last entry of requests before the last turn or plan
        self._was_empty = False  # no request was left at the last idle turn

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

    # ------------------------------------------------------------ what came in

    def start(self, fence: EntryId) -> None:
        """Begin the epoch whose first entry this is; its number is a time in milliseconds."""
        self.outputs_cursor = fence
        self._requests.pass_time(fence.epoch)

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
        """Take over an unfinished request of an earlier epoch; what to append to outputs.

        Args:
            outputs: generated tokens of each choice, or running beam, that has not ended.
            ended: the choices that have.
            search: instead of ``ended``, for a request with beams.
            num_deaths: of workers that were computing it, one after the other.
            was_admitted: it has had its turn, even if nothing came of it yet.
            accepted: when; requests are recovered in the order of their arrival.
        """
        return self._requests.recover(
            submit, outputs, ended, search, num_deaths, was_admitted, accepted
        )

    def remember(self, request_id: str, ended: EndedRequest) -> None:
        """Know of a request that ended in an earlier epoch."""
        self._requests.remember(request_id, ended)

    def apply(self, event: Message, at: EntryId) -> list[Message]:
        """Take note of an entry of ``requests`` or ``outputs``; what to append to outputs.

        Raises:
            ProtocolError: a result that no plan asked for, or that cannot be.
            DecodeError: no reader can make sense of an entry of ``requests``; nothing has changed.
        """
        match event:
            case StepResult():
                _check_result(event, self.config.vocab_size)
                self.outputs_cursor = at
                ended = _ended(event) if len(event.ended_rows) else ()
                return self.take_in(event.step, event.handles, event.tokens, ended, event.beams)
            case RequestState():
                self.outputs_cursor = at
                group = self._requests.find(event.submit.request_id)
                if group is not None and event.submit.attachment == group.submit.attachment:
                    self._retention.stated(group, at, not event.submit.lacks_prompt)
                return []
            case Submit() | Attach() | Stop() | Abort() | GatewayLost() | Pin() | Drain():
                check(event, self.config.vocab_size)
                self._answers.cursor = at
                self._requests.hear_at(at.epoch)
                return self._apply_request(event)
        self.outputs_cursor = at
        return []

    def read_outputs(self, at: EntryId, num_bytes: int) -> None:
        """An entry of ``outputs`` of this size was read; before its messages are applied."""
        self._retention.read(at, num_bytes)

    def skip_request(self, at: EntryId) -> None:
        """An entry of ``requests`` that could not be read is done with."""
        self._answers.cursor = at

    def _apply_request(self, event: Message) -> list[Message]:
        requests = self._requests
        match event:
            case Submit():
                return requests.submit(event)
            case Attach():
                return requests.attach(event)
            case Stop():
                return requests.stop(event)
            case Abort():
                return requests.abort(event)
            case GatewayLost():
                return requests.gateway_lost(event)
            case Pin():
                requests.pin(event)
            case Drain() if event.epoch == self.outputs_cursor.epoch:
                self._policy.is_draining = True
        return []

    def take_in(
        self,
        step: int,
        handles: IntArray,
        tokens: IntArray,
        ended: Sequence[tuple[int, EndFlag]],
        beams: Sequence[BeamCandidates],
    ) -> list[Message]:
        """``apply`` of a StepResult for somebody who has no message: the same, not packed.

        Args:
            step: whose result it is.
            handles: that sampled.
            tokens: one for each of them.
            ended: handles of those whose token is their last, and why.
            beams: candidates, one for each BeamStep of the plan.

        Raises:
            ProtocolError: a result that no plan asked for.
        """
        done = self._planner.apply(step, handles, tokens, beams)
        for handle, flag in ended:
            self._requests.flagged(handle, flag)
        return [self._requests.finish_search(group) for group in done]

    # --------------------------------------------------------------- what next

    def schedule(self, now_ms: int) -> StepPlan | None:
        """The next step, or None if there is nothing to do or enough is in flight.

        What the time alone has ended is told by ``take_answers``.
        """
        draft = self.draft(now_ms)
        if draft is None:
            return None
        idle_turns, self._idle_turns = self._idle_turns, []
        return draft.finish(
            now_ms,
            self.requests_cursor,
            self.outputs_cursor,
            self.outputs_min_id,
            idle_turns,
        )

    def draft(self, now_ms: int) -> PlanDraft | None:
        """``schedule`` for somebody who needs no message: the same step, not packed."""
        if self._planner.is_full:
            if self.requests_cursor != self._turn_cursor:
                self._note_idle_turn(now_ms)  # they were applied before the results to come
            return None
        self._timed_out += self._requests.pass_time(now_ms)
        draft = self._planner.new_draft()
        is_planned = self._policy.schedule(draft)
        for group, sequence in draft.dropped:
            self._requests.dropped(group, sequence)
        if not is_planned:
            self._note_idle_turn(now_ms)
            return None
        self._planner.planned_step = draft.step
        self._was_empty = False
        self._turn_cursor = self.requests_cursor
        draft.retired, self._tables.retired = self._tables.retired, []
        return draft

    def take_answers(self) -> list[Message]:
        """What to append to outputs before the plans made since the last call."""
        taken, self._timed_out = self._timed_out, []
        return taken

    def _note_idle_turn(self, now_ms: int) -> None:
        """Looking may have changed something: a replay must look at the same moments.

        While there is no request at all, only the first moment matters, and an idle engine that is
        sent nonsense must not collect them without end.
        """
        is_empty = not len(self._requests)
        if not (is_empty and self._was_empty):
            turn = Turn(now_ms, str(self.requests_cursor), str(self.outputs_cursor))
            self._idle_turns.append(turn)
            self._turn_cursor = self.requests_cursor
        self._was_empty = is_empty

    # ------------------------------------------------------------- for the log

    def checkpoints(self, is_pressed: bool = False) -> list[RequestState]:
        """Fresh RequestStates of requests whose old ones hold the outputs log back, or that
        another gateway delivers now.

        They hold good only right behind ``outputs_cursor``: append them with exactly the next id.

        Args:
            is_pressed: the log should become as short as it can.
        """
        retention, head = self._retention, self.outputs_cursor
        return [
            self._answers.state(found, retention.needs_prompt(found, head, is_pressed))
            for found in retention.overdue(head, is_pressed)
        ]

    @property
    def outputs_needed_id(self) -> EntryId:
        """Entries of ``outputs`` below are of use to slow readers alone."""
        return self._retention.needed_id(self.outputs_cursor)

    @property
    def outputs_min_id(self) -> EntryId:
        """Entries of ``outputs`` below may be trimmed, as far as this epoch alone knows."""
        return self._retention.min_id(self.outputs_cursor)

    @property
    def owes_states(self) -> bool:
        """A gateway waits for a checkpoint, or the log cannot be trimmed without one."""
        return self._retention.owes(self.outputs_cursor)

    @property
    def outputs_bytes_left(self) -> int:
        """What earlier epochs may keep of the outputs log beside this one's entries."""
        return self._retention.bytes_left

    def find(self, request_id: str) -> SequenceGroup | None:
        """A request that has not ended."""
        return self._requests.find(request_id)

    def state_of(self, group: SequenceGroup) -> RequestState:
        """All that the log must know of an unfinished request."""
        return self._answers.state(group)

    def suspects(self) -> list[int]:
        """Handles that a worker was computing, if it is dead."""
        return self._planner.suspects()

    def gateways(self) -> set[str]:
        """Instances that deliver unfinished requests."""
        return {group.submit.gateway for group in self._requests.groups()} - {""}

    # ---------------------------------------------------------- for its owner

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Some client's request is running or waits for its turn."""
        return self.has_running or len(self._planner.queues.backlog) > 0

    @property
    def is_draining(self) -> bool:
        """Nobody is admitted for the first time any more."""
        return self._policy.is_draining

    @property
    def has_running(self) -> bool:
        """Something was admitted that has not ended."""
        queues = self._planner.queues
        return bool(queues.running or queues.preempted)

    @property
    def running(self) -> Sequence[SequenceGroup]:
        """All that hold blocks, earliest first."""
        return self._planner.queues.running

    def take_notes(self) -> list[events.Note]:
        """What happened since the last call, for logs and metrics."""
        taken = self._notes.copy()
        self._notes.clear()
        return taken + self._prefixes.take_notes()

    def prefixes(self) -> tuple[PrefixStatus, ...]:
        """What became of all Pins; one that is not here should be sent again."""
        return self._prefixes.statuses()

    def stats(self) -> events.Stats:
        """Queues and pool right now; looks at every running sequence."""
        queues = self._planner.queues
        return events.collect(
            self.pool,
            self.config.block_size,
            queues.running,
            num_waiting=queues.num_waiting + len(queues.preempted),
            num_swapped=sum(group.is_swapped for group in queues.preempted),
            num_pinned_prefixes=len(self._prefixes),
            step=self.planned_step,
        )


def _ended(result: StepResult) -> list[tuple[int, EndFlag]]:
    """Sequences that have ended, and why."""
    handles = result.handles[result.ended_rows].tolist()
    return list(zip(handles, map(EndFlag, result.ended_flags.tolist()), strict=True))


def _check_result(result: StepResult, vocab_size: int) -> None:
    try:
        check(result, vocab_size)
    except DecodeError as error:
        raise ProtocolError(f"result of step {result.step}: {error}") from None
