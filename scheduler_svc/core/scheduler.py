"""The scheduler core: who computes what next, on which blocks.

Pure: no clock, no log, no Redis. The service feeds it what it read, and publishes what it returns;
the same calls with the same arguments give the same plans.

Progress is a number of planned tokens that chases the number of tokens; prefill and decode are no
modes. Interpreted work per step is proportional to what changed: a group whose sequences stay
inside their last blocks costs nothing. Its lengths follow from step numbers, and calendars say in
which step it opens a block, has filled one, and ends at the latest.
"""

from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter

from scheduler_svc.core import notes
from scheduler_svc.core.beams import BeamSearch
from scheduler_svc.core.config import Preemption, ProtocolError, SchedulerConfig
from scheduler_svc.core.draft import PlanDraft
from scheduler_svc.core.limits import kind_of_preemption, why_never
from scheduler_svc.core.pins import PinnedPrefixes
from scheduler_svc.core.prefill import plan_chunks
from scheduler_svc.core.prefix import first_hash
from scheduler_svc.core.queues import BY_RANK, Queues
from scheduler_svc.core.retention import Retention
from scheduler_svc.core.searches import Searches
from scheduler_svc.core.sequence import (
    NO_TOKENS,
    EndedChoice,
    GroupState,
    Sequence,
    SequenceGroup,
)
from scheduler_svc.core.tables import BlockTables
from scheduler_svc.core.tokens import TokenStore
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages import (
    Abort,
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    EndFlag,
    FinishReason,
    Pin,
    PrefixStatus,
    RequestEnded,
    RequestState,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    Turn,
)

_S = GroupState


class Scheduler:
    """FCFS continuous batching over a paged pool, with preemption by recomputation or swapping.

    Policy (PagedAttention, section 4.5): by priority and then by arrival the earliest are served
    first and the latest preempted first; a group's sequences run together or not at all; nobody new
    is admitted while a preempted group waits.
    """

    def __init__(self, config: SchedulerConfig, requests_cursor: EntryId = START) -> None:
        self.config = config
        self.requests_cursor = requests_cursor
        self.outputs_cursor = START
        self.planned_step = 0
        self.applied_step = 0
        self._tables = BlockTables(config)
        self.pool = self._tables.pool
        self.host_pool = self._tables.host_pool
        self._prefixes = PinnedPrefixes(config, self.pool)
        self._tokens = TokenStore(config.max_num_sequences, config.max_model_len)
        self._retention = Retention(config.outputs_retention)
        self._by_request: dict[str, SequenceGroup] = {}
        self._by_handle: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._queues = Queues()
        self._searches = Searches(self._tables, self._new_handle)
        self._num_accepted = 0
        self._num_handles = 0
        # The calendars, by step. An entry may be out of date; whoever reads it checks.
        self._opens_block: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._reaches_limit: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._samples_first: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._idle_turns: list[Turn] = []
        self._turn_cursor = requests_cursor  # last entry of requests before the last turn or plan
        self._was_empty = False  # no request was left at the last idle turn
        self._notes: list[notes.Note] = []

    # ------------------------------------------------------------ what came in

    def recover(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray],
        ended: Mapping[int, EndedChoice],
        search: BeamSearch | None = None,
    ) -> list[Message]:
        """Take over an unfinished request of an earlier epoch; what to append to outputs.

        Args:
            outputs: generated tokens of each choice, or running beam, that has not ended.
            ended: the choices that have.
            search: instead of ``ended``, for a request with beams.
        """
        return self._accept(submit, outputs, ended, search, recovered=True)

    def apply(self, event: Message, at: EntryId) -> list[Message]:
        """Take note of an entry of ``requests`` or ``outputs``; what to append to outputs.

        Raises:
            ProtocolError: a result that no plan asked for.
        """
        match event:
            case StepResult():
                self.outputs_cursor = at
                return self._apply_result(event)
            case RequestState():
                self.outputs_cursor = at
                if (group := self._by_request.get(event.submit.request_id)) is not None:
                    self._retention.stated(group, at)
                return []
            case Submit():
                self.requests_cursor = at
                return self._accept(event, dict.fromkeys(range(event.num_choices), NO_TOKENS), {})
            case Stop():
                self.requests_cursor = at
                return self._stop(event)
            case Abort():
                self.requests_cursor = at
                return self._abort(event)
            case Pin():
                self.requests_cursor = at
                if (submit := self._prefixes.add(event)) is not None:
                    self._compute_prefix(submit)
                return []
        self.outputs_cursor = at
        return []

    def skip_request(self, at: EntryId) -> None:
        """An entry of ``requests`` that could not be read is done with."""
        self.requests_cursor = at

    # --------------------------------------------------------------- what next

    def schedule(self, now_ms: int) -> StepPlan | None:
        """The next step, or None if there is nothing to do or enough is in flight."""
        if self.planned_step - self.applied_step >= self.config.max_plans_in_flight:
            if self.requests_cursor != self._turn_cursor:
                self._note_idle_turn(now_ms)  # they were applied before the results to come
            return None
        step = self.planned_step + 1
        draft = PlanDraft(step, self.config.max_num_batched_tokens)
        self._drain_those_at_their_limit(step)
        self._make_room(draft)
        num_decoding = self._queues.num_decoding
        draft.budget -= num_decoding
        self._continue_prefills(draft)
        self._admit(draft)
        if num_decoding == 0 and draft.is_empty:
            self._note_idle_turn(now_ms)
            return None
        self.planned_step = step
        self._was_empty = False
        self._turn_cursor = self.requests_cursor
        retired, self._tables.retired = self._tables.retired, []
        idle_turns, self._idle_turns = self._idle_turns, []
        return draft.finish(
            now_ms,
            self.requests_cursor,
            self.outputs_cursor,
            self._retention.min_id(self.outputs_cursor),
            retired,
            idle_turns,
        )

    def _note_idle_turn(self, now_ms: int) -> None:
        """Looking may have changed something: a replay must look at the same moments.

        While there is no request at all, only the first moment matters, and an idle engine that is
        sent nonsense must not collect them without end.
        """
        is_empty = not self._by_request
        if not (is_empty and self._was_empty):
            turn = Turn(now_ms, str(self.requests_cursor), str(self.outputs_cursor))
            self._idle_turns.append(turn)
            self._turn_cursor = self.requests_cursor
        self._was_empty = is_empty

    def checkpoints(self) -> list[RequestState]:
        """Fresh RequestStates of requests whose old ones hold the outputs log back.

        They hold good only right behind ``outputs_cursor``: append them with exactly the next id.
        """
        return [self.state_of(found) for found in self._retention.overdue(self.outputs_cursor)]

    def state_of(self, group: SequenceGroup) -> RequestState:
        """All that the log must know of an unfinished request."""
        cursor = str(self.requests_cursor)
        if group.search is not None:
            return RequestState(group.submit, tuple(group.search.choices(group.handle)), cursor)
        choices = [
            ChoiceState(
                sequence.choice,
                sequence.handle,
                sequence.output if sequence.slot is None else self._tokens.output(sequence.slot),
                finish_reason="",
            )
            for sequence in group.sequences
        ]
        choices += [
            ChoiceState(choice, 0, found.output, found.reason)
            for choice, found in group.ended.items()
        ]
        choices.sort(key=attrgetter("choice"))
        return RequestState(group.submit, tuple(choices), cursor)

    def take_notes(self) -> list[notes.Note]:
        """What happened since the last call, for logs and metrics."""
        taken, self._notes = self._notes, []
        return taken + self._prefixes.take_notes()

    def prefixes(self) -> tuple[PrefixStatus, ...]:
        """What became of all Pins; one that is not here should be sent again."""
        return self._prefixes.statuses()

    def stats(self) -> notes.Stats:
        """Queues and pool right now; looks at every running sequence."""
        queues = self._queues
        return notes.collect(
            self.pool,
            self.config.block_size,
            queues.running,
            num_waiting=queues.num_waiting + len(queues.preempted),
            num_swapped=sum(group.is_swapped for group in queues.preempted),
            num_pinned_prefixes=len(self._prefixes),
            step=self.planned_step,
        )

    # ------------------------------------------------------------------ events

    def _accept(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray],
        ended: Mapping[int, EndedChoice],
        search: BeamSearch | None = None,
        recovered: bool = False,
    ) -> list[Message]:
        if submit.request_id in self._by_request:
            return []
        if search is not None and search.done:
            return [self._beams_ended(submit.request_id, search)]
        num_prompt = len(submit.prompt)
        max_output = min(submit.sampling.max_tokens, self.config.max_model_len - num_prompt)
        if (reason := why_never(self.config, submit, max_output)) is not None:
            self._notes.append(notes.Refused(submit.request_id, reason))
            return [self._ended(submit.request_id, FinishReason.ERROR, reason)]
        if any(len(output) >= max_output for output in outputs.values()):
            # Recovered into a smaller context than it had.
            return [self._ended(submit.request_id, FinishReason.LENGTH)]
        self._num_accepted += 1
        if submit.sampling.beams is not None and search is None:
            search = BeamSearch(submit.sampling.beams, max_output)
            outputs = {0: NO_TOKENS}
        group = SequenceGroup(
            submit=submit,
            arrival=self._num_accepted,
            max_output=max_output,
            root=first_hash(submit.cache_salt),
            sequences=[self._new_sequence(choice, output) for choice, output in outputs.items()],
            ended=dict(ended),
            search=search,
        )
        self._by_request[submit.request_id] = group
        if search is None:
            for sequence in group.sequences:
                self._by_handle[sequence.handle] = (group, sequence)
        else:
            group.handle = group.sequences[0].handle
        self._queues.wait(group)
        self._notes.append(notes.Accepted(submit.request_id, num_prompt, recovered))
        return [self.state_of(group)]

    def _compute_prefix(self, submit: Submit) -> None:
        """Compute a pinned prefix once nobody else waits, unless somebody asks for it before."""
        self._num_accepted += 1
        sequence = self._new_sequence(0, NO_TOKENS)
        group = SequenceGroup(
            submit=submit,
            arrival=self._num_accepted,
            max_output=1,
            root=first_hash(submit.cache_salt),
            sequences=[sequence],
            serves_nobody=True,
        )
        self._by_request[submit.request_id] = group
        self._by_handle[sequence.handle] = (group, sequence)
        self._queues.wait(group)

    def _new_sequence(self, choice: int, output: IntArray) -> Sequence:
        return Sequence(choice, self._new_handle(), output)

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    def _stop(self, stop: Stop) -> list[Message]:
        group = self._by_request.get(stop.request_id)
        if group is None or group.search is not None:
            return []
        if group.state is _S.PREFILLING and len(group.prefilled) < len(group.sequences):
            return []  # no choice has a token yet: nothing can have been found in it
        for sequence in group.sequences:
            if sequence.choice == stop.choice:
                if group.state is _S.PREFILLING and len(group.sequences) > 1:
                    self._leave_prefill(group, sequence)
                self._end(group, sequence, FinishReason.STOP)
                break
        else:
            return []
        if group.state is _S.ENDED:
            return [self._ended(stop.request_id, FinishReason.STOP)]
        cursor = str(self.requests_cursor)
        return [ChoiceEnded(stop.request_id, stop.choice, FinishReason.STOP, cursor)]

    def _leave_prefill(self, group: SequenceGroup, sequence: Sequence) -> None:
        """One of several sequences that are computed again is about to end."""
        index = group.prefilled.index(sequence)
        del group.prefilled[index]
        if any(later.num_planned > sequence.num_planned for later in group.prefilled[index:]):
            # They may count on blocks that it was to fill: all of them start over.
            lost = sum(found.num_planned for found in group.sequences)
            request_id = group.request_id
            self._notes.append(notes.Preempted(request_id, request_id, Preemption.RECOMPUTE, lost))
            self._wait_for_blocks(group)

    def _abort(self, abort: Abort) -> list[Message]:
        group = self._by_request.get(abort.request_id)
        if group is None or group.submit.attachment != abort.attachment:
            return []
        if group.search is not None:
            self._end_search(group, FinishReason.ABORT)
        for sequence in list(group.sequences):
            self._end(group, sequence, FinishReason.ABORT)
        return [self._ended(abort.request_id, FinishReason.ABORT)]

    def _ended(self, request_id: str, reason: FinishReason, error: str = "") -> RequestEnded:
        return RequestEnded(request_id, reason, error, str(self.requests_cursor))

    def _beams_ended(self, request_id: str, search: BeamSearch) -> Message:
        hypotheses, width = search.hypotheses(), search.params.width
        if len(hypotheses) < width:
            error = f"the model's logits allow {len(hypotheses)} of {width} beams"
            return self._ended(request_id, FinishReason.ERROR, error)
        return BeamsEnded(request_id, hypotheses, str(self.requests_cursor))

    def _apply_result(self, result: StepResult) -> list[Message]:
        if result.step != self.applied_step + 1 or result.step > self.planned_step:
            raise ProtocolError(
                f"result of step {result.step}: {self.applied_step} steps are applied, "
                f"{self.planned_step} planned"
            )
        self.applied_step = result.step
        try:
            self._tokens.append(result.handles, result.tokens)
            ended_handles = result.handles[result.ended_rows].tolist()
            flags = [EndFlag(flag) for flag in result.ended_flags.tolist()]
        except (IndexError, ValueError) as error:
            raise ProtocolError(f"result of step {result.step}: {error}") from None
        for group in self._samples_first.pop(result.step, ()):
            self._notes.append(notes.FirstToken(group.request_id))
        for handle, flag in zip(ended_handles, flags, strict=False):
            if (found := self._by_handle.get(handle)) is not None:
                self._end(*found, flag.finish_reason())
        return [self._finish_search(group) for group in self._searches.apply(result)]

    # ------------------------------------------------------------------ a step

    def _drain_those_at_their_limit(self, step: int) -> None:
        for group in self._reaches_limit.pop(step - 1, ()):
            if group.state is _S.DECODING and group.last_step == step - 1:
                self._queues.drain(group)

    def _make_room(self, draft: PlanDraft) -> None:
        """Give blocks to each group whose next tokens have no room in blocks of their own."""
        step = draft.step
        due = self._searches.take_due()
        for group in self._opens_block.pop(step, ()):
            if group.state is _S.DECODING and group.next_block_step == step:
                group.next_block_step = 0  # preempted and back, it may be noted here twice
                due.append(group)
        tables = self._tables
        positions = [group.next_position(step) for group in due]
        needed = sum(map(tables.num_needed, due, positions))
        blocks = self.pool.allocate(needed)
        if blocks is None:
            self._make_room_by_rank(due, draft)
            return
        for group, position in zip(due, positions, strict=True):
            tables.make_room(group, position, blocks, draft)
            self._go_on(group, position, draft)

    def _make_room_by_rank(self, due: list[SequenceGroup], draft: PlanDraft) -> None:
        """The same when not all can have what they need: the latest have to go."""
        for group in sorted(due, key=BY_RANK):
            if group.state is _S.PREEMPTED:
                continue
            position = group.next_position(draft.step)
            blocks = self._blocks_for(group, position, draft)
            if blocks is not None:
                self._tables.make_room(group, position, blocks, draft)
                self._go_on(group, position, draft)

    def _blocks_for(
        self, group: SequenceGroup, position: int, draft: PlanDraft
    ) -> list[int] | None:
        """Free blocks, if need be from the latest; None if the group itself had to go."""
        needed = self._tables.num_needed(group, position)
        while (blocks := self.pool.allocate(needed)) is None:
            victim = self._queues.victim()
            is_earliest = group is self._queues.running[0]
            if victim is group and is_earliest and self._give_up_prefix(group):
                continue
            self._preempt(victim, group, draft)
            if victim is group:
                return None
        return blocks

    def _go_on(self, group: SequenceGroup, position: int, draft: PlanDraft) -> None:
        """The group has room to write at ``position``."""
        if group.state is _S.SEARCHING:
            draft.search(group)
            self._searches.planned(group, draft.step)
        else:
            self._note_next_block(group, position, draft.step)

    def _note_next_block(self, group: SequenceGroup, position: int, step: int) -> None:
        """``step`` has room to write at ``position``; note when the block is full."""
        due = step + self.config.block_size - position % self.config.block_size
        group.next_block_step = due
        if due <= group.last_step:
            self._opens_block[due].append(group)

    def _give_up_prefix(self, beneficiary: SequenceGroup) -> bool:
        """Unpin a prefix for a group that would have to wait for ever; whether there was one."""
        prefix_id = self._prefixes.give_up(beneficiary)
        if (group := self._by_request.get(prefix_id or "")) is not None:
            self._end(group, group.sequences[0], FinishReason.ABORT)
        return prefix_id is not None

    def _preempt(self, victim: SequenceGroup, beneficiary: SequenceGroup, draft: PlanDraft) -> None:
        if victim.serves_nobody:
            # As a preempted one it would hold up those that wait for the first time.
            self._end(victim, victim.sequences[0], FinishReason.ABORT)
            self._compute_prefix(victim.submit)
            return
        lost = sum(victim.kv_tokens_at(self.planned_step, found) for found in victim.sequences)
        kind = self._kind_of_preemption(victim)
        note = notes.Preempted(victim.request_id, beneficiary.request_id, kind, lost)
        self._notes.append(note)
        if kind is Preemption.SWAP:
            self._tables.swap_out(victim, draft)
        self._wait_for_blocks(victim)

    def _wait_for_blocks(self, group: SequenceGroup) -> None:
        """A running group loses its blocks until it is admitted again."""
        group.note_beams()
        group.parents = []
        for sequence in group.sequences:
            self._give_up_blocks(group, sequence)
        self._queues.preempt(group)
        group.last_step = self.planned_step  # its results may come until then

    def _kind_of_preemption(self, victim: SequenceGroup) -> Preemption:
        if victim.state is _S.PREFILLING:
            return Preemption.RECOMPUTE  # half a prompt is not worth keeping
        num_blocks = self._tables.num_blocks_of(victim)
        return kind_of_preemption(self.config, num_blocks, self.host_pool.num_free)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        for group in list(self._queues.prefilling):
            if draft.budget <= 0:
                return
            self._plan_chunks(group, draft)

    def _admit(self, draft: PlanDraft) -> None:
        while draft.budget > 0:
            group = self._next_to_admit()
            if group is None or self._num_free_seats < group.num_seats:
                return
            reserve = self.config.num_watermark_blocks if self._queues.running else 0
            group.prepare_prefill()
            while not self._get_blocks(group, reserve, draft):
                is_alone = not self._queues.running and not group.serves_nobody
                if not is_alone or not self._give_up_prefix(group):
                    return
            self._open(group, draft)
            self._plan_chunks(group, draft)

    def _get_blocks(self, group: SequenceGroup, reserve: int, draft: PlanDraft) -> bool:
        """Blocks for all of a group, or nothing; what was swapped out comes back."""
        if group.is_swapped:
            return self._tables.swap_in(group, reserve, draft)
        return self._tables.admit(group, reserve)

    @property
    def _num_free_seats(self) -> int:
        """Sequences that may still be admitted."""
        return self._tokens.num_free_slots - self._queues.num_beams

    def _next_to_admit(self) -> SequenceGroup | None:
        if not self._queues.preempted:
            return self._queues.first_waiting()
        first = self._queues.preempted[0]
        if first.last_step > self.applied_step:
            return None  # the tokens of its last plans are not in yet
        for sequence in first.sequences:
            self._hand_in_slot(sequence)
        return first

    def _open(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Put a group that has just got its blocks into the plan."""
        self._queues.admit(group)
        if group.search is None:
            for sequence in group.sequences:
                sequence.slot = self._tokens.open(sequence.handle, sequence.output)
        draft.admit(group)
        self._prefixes.used_by(group)
        if group.serves_nobody:
            return
        num_output = group.num_tokens - group.num_prompt_tokens
        self._notes.append(
            notes.Admitted(
                group.request_id,
                again=group.was_admitted or num_output > 0,
                num_tokens=group.num_tokens * len(group.prefilled),
                num_reused=sum(sequence.num_planned for sequence in group.prefilled),
            )
        )
        group.was_admitted = True

    def _plan_chunks(self, group: SequenceGroup, draft: PlanDraft) -> None:
        if not plan_chunks(group, draft, self._tables):
            return
        if group.search is None:
            self._start_decoding(group, draft.step)
            return
        self._queues.prefilled(group, _S.SEARCHING)
        draft.search(group)
        self._searches.planned(group, draft.step)

    def _start_decoding(self, group: SequenceGroup, step: int) -> None:
        """``step`` samples a token; from the next one on the group decodes by itself."""
        num_generated = group.num_tokens - group.num_prompt_tokens
        if num_generated == 0 and not group.serves_nobody:
            self._samples_first[step].append(group)
        group.decode_from = step + 1
        group.last_step = step + group.max_output - num_generated - 1
        if group.last_step == step:
            self._queues.prefilled(group, _S.DRAINING)
            return
        self._queues.prefilled(group, _S.DECODING)
        self._reaches_limit[group.last_step].append(group)
        # Step decode_from computes the token at position num_tokens: at a border it needs a new
        # block, and forks need room of their own.
        position = group.num_tokens
        if position % self.config.block_size == 0 or self._tables.num_needed(group, position):
            group.next_block_step = group.decode_from
            self._opens_block[group.decode_from].append(group)
        else:
            self._note_next_block(group, position, group.decode_from)

    # --------------------------------------------------------------- an ending

    def _end(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """Forget a sequence; what it held is free for the next plan."""
        self._give_up_blocks(group, sequence)
        self._tables.drop_swapped(sequence)
        self._hand_in_slot(sequence)
        if len(group.sequences) == 1:
            self._queues.end(group)
        else:
            self._queues.end_sequence(group)
        group.sequences.remove(sequence)
        group.ended[sequence.choice] = EndedChoice(sequence.output, reason)
        del self._by_handle[sequence.handle]
        if group.state is _S.ENDED:
            self._forget(group, reason, sum(len(found.output) for found in group.ended.values()))

    def _finish_search(self, group: SequenceGroup) -> Message:
        """A beam search is over: all that it found at once."""
        assert group.search is not None, f"{group.request_id} has no beams"
        message = self._beams_ended(group.request_id, group.search)
        self._end_search(group, FinishReason.STOP)
        return message

    def _end_search(self, group: SequenceGroup, reason: FinishReason) -> None:
        for sequence in group.sequences:
            self._tables.give_up(sequence)
            self._tables.drop_swapped(sequence)
        assert group.search is not None, f"{group.request_id} has no beams"
        hypotheses = group.search.hypotheses()
        self._queues.end(group)
        group.sequences = []
        self._forget(group, reason, sum(len(found.tokens) for found in hypotheses))

    def _forget(self, group: SequenceGroup, reason: FinishReason, num_generated: int) -> None:
        """A group has ended."""
        del self._by_request[group.request_id]
        if group.serves_nobody:
            if reason is not FinishReason.ABORT:
                self._prefixes.computed(group.request_id)
            return
        self._retention.ended(group)
        self._notes.append(notes.Ended(group.request_id, reason, num_generated))

    def _give_up_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Free a sequence's blocks, if it has any; the full ones stay findable."""
        if not sequence.block_table:
            return
        num_computed = sequence.num_planned
        if group.state is not _S.PREFILLING:
            if sequence.slot is not None:
                sequence.output = self._tokens.output(sequence.slot)
            # The last token that is known was sampled, but is not computed for sure.
            num_computed = group.num_prompt_tokens + len(sequence.output) - 1
        self._tables.register_computed(group, sequence, num_computed)
        self._tables.give_up(sequence)

    def _hand_in_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            sequence.output = self._tokens.close(sequence.handle)
            sequence.slot = None
