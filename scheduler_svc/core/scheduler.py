"""The scheduler core: who computes what next, on which blocks.

Pure: no clock, no log, no Redis. The service feeds it what it read, and publishes what it returns;
the same calls with the same arguments give the same plans.

Progress is a number of planned tokens that chases the number of tokens; prefill and decode are no
modes. Interpreted work per step is proportional to what changed: a group whose sequences stay
inside their last blocks costs nothing. Its lengths follow from step numbers, and calendars say in
which step it opens a block, has filled one, and ends at the latest.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from heapq import heappop, heappush
from operator import attrgetter

from scheduler_svc.core import notes
from scheduler_svc.core.config import Preemption, ProtocolError, SchedulerConfig
from scheduler_svc.core.draft import PlanDraft
from scheduler_svc.core.limits import kind_of_preemption, why_never
from scheduler_svc.core.prefill import plan_chunks
from scheduler_svc.core.prefix import first_hash
from scheduler_svc.core.retention import Retention
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
    ChoiceEnded,
    ChoiceState,
    EndFlag,
    FinishReason,
    RequestEnded,
    RequestState,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    Turn,
)

_S = GroupState
_BY_RANK = attrgetter("rank")


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
        self._tokens = TokenStore(config.max_num_sequences, config.max_model_len)
        self._retention = Retention(config.outputs_retention)
        self._by_request: dict[str, SequenceGroup] = {}
        self._by_handle: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._waiting: list[tuple[tuple[int, int], SequenceGroup]] = []  # a heap
        self._num_waiting = 0  # without those in the heap that have ended
        self._preempted: list[SequenceGroup] = []  # by rank
        self._prefilling: list[SequenceGroup] = []  # by rank
        self._running: list[SequenceGroup] = []  # all that hold blocks, by rank
        self._num_decoding = 0  # sequences
        self._num_accepted = 0
        self._next_handle = 1
        self._retired: list[int] = []  # handles that the next plan takes from the worker
        # The calendars, by step. An entry may be out of date; whoever reads it checks.
        self._opens_block: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._reaches_limit: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._samples_first: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._idle_turns: list[Turn] = []
        self._was_empty = False  # no request was left at the last idle turn
        self._notes: list[notes.Note] = []

    # ------------------------------------------------------------ what came in

    def recover(
        self, submit: Submit, outputs: Mapping[int, IntArray], ended: Mapping[int, EndedChoice]
    ) -> list[Message]:
        """Take over an unfinished request of an earlier epoch; what to append to outputs.

        Args:
            outputs: generated tokens of each choice that has not ended.
            ended: the choices that have.
        """
        return self._accept(submit, outputs, ended, recovered=True)

    def apply(self, event: Message, at: EntryId) -> list[Message]:
        """Take note of an entry of ``requests`` or ``outputs``; what to append to outputs.

        Raises:
            ProtocolError: a result that no plan asked for.
        """
        match event:
            case StepResult():
                self.outputs_cursor = at
                self._apply_result(event)
                return []
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
        self.outputs_cursor = at
        return []

    def skip_request(self, at: EntryId) -> None:
        """An entry of ``requests`` that could not be read is done with."""
        self.requests_cursor = at

    # --------------------------------------------------------------- what next

    def schedule(self, now_ms: int) -> StepPlan | None:
        """The next step, or None if there is nothing to do or enough is in flight."""
        if self.planned_step - self.applied_step >= self.config.max_plans_in_flight:
            return None
        step = self.planned_step + 1
        draft = PlanDraft(step)
        self._drain_those_at_their_limit(step)
        self._open_blocks(draft)
        num_decoding = self._num_decoding
        draft.budget = self.config.max_num_batched_tokens - num_decoding
        self._continue_prefills(draft)
        self._admit(draft)
        if num_decoding == 0 and draft.is_empty:
            self._note_idle_turn(now_ms)
            return None
        self.planned_step = step
        self._was_empty = False
        retired, self._retired = self._retired, []
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
        self._was_empty = is_empty

    def checkpoints(self) -> list[RequestState]:
        """Fresh RequestStates of requests whose old ones hold the outputs log back.

        They hold good only right behind ``outputs_cursor``: append them with exactly the next id.
        """
        return [self.state_of(found) for found in self._retention.overdue(self.outputs_cursor)]

    def state_of(self, group: SequenceGroup) -> RequestState:
        """All that the log must know of an unfinished request."""
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
        return RequestState(group.submit, tuple(choices), str(self.requests_cursor))

    def take_notes(self) -> list[notes.Note]:
        """What happened since the last call, for logs and metrics."""
        taken, self._notes = self._notes, []
        return taken

    def stats(self) -> notes.Stats:
        """Queues and pool right now; looks at every running sequence."""
        return notes.collect(
            self.pool,
            self.config.block_size,
            self._running,
            num_waiting=self._num_waiting + len(self._preempted),
            num_swapped=sum(group.is_swapped for group in self._preempted),
            step=self.planned_step,
        )

    # ------------------------------------------------------------------ events

    def _accept(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray],
        ended: Mapping[int, EndedChoice],
        recovered: bool = False,
    ) -> list[Message]:
        if submit.request_id in self._by_request:
            return []
        num_prompt = len(submit.prompt)
        max_output = min(submit.sampling.max_tokens, self.config.max_model_len - num_prompt)
        if (reason := why_never(self.config, submit, max_output)) is not None:
            self._notes.append(notes.Refused(submit.request_id, reason))
            return [self._ended(submit.request_id, FinishReason.ERROR, reason)]
        if any(len(output) >= max_output for output in outputs.values()):
            # Recovered into a smaller context than it had.
            return [self._ended(submit.request_id, FinishReason.LENGTH)]
        self._num_accepted += 1
        group = SequenceGroup(
            submit=submit,
            arrival=self._num_accepted,
            max_output=max_output,
            root=first_hash(submit.cache_salt),
            sequences=[self._new_sequence(choice, output) for choice, output in outputs.items()],
            ended=dict(ended),
        )
        self._by_request[submit.request_id] = group
        for sequence in group.sequences:
            self._by_handle[sequence.handle] = (group, sequence)
        heappush(self._waiting, (group.rank, group))
        self._num_waiting += 1
        self._notes.append(notes.Accepted(submit.request_id, num_prompt, recovered))
        return [self.state_of(group)]

    def _new_sequence(self, choice: int, output: IntArray) -> Sequence:
        self._next_handle += 1
        return Sequence(choice, self._next_handle - 1, output)

    def _stop(self, stop: Stop) -> list[Message]:
        group = self._by_request.get(stop.request_id)
        if group is None:
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
        is_first = sequence is group.prefilled[0]
        group.prefilled.remove(sequence)
        if is_first and sequence.num_planned < group.prefilled[0].num_planned:
            # The others count on prompt blocks that it was to fill: all of them start over.
            lost = sum(found.num_planned for found in group.sequences)
            request_id = group.request_id
            self._notes.append(notes.Preempted(request_id, request_id, Preemption.RECOMPUTE, lost))
            self._wait_for_blocks(group)

    def _abort(self, abort: Abort) -> list[Message]:
        group = self._by_request.get(abort.request_id)
        if group is None or group.submit.attachment != abort.attachment:
            return []
        for sequence in list(group.sequences):
            self._end(group, sequence, FinishReason.ABORT)
        return [self._ended(abort.request_id, FinishReason.ABORT)]

    def _ended(self, request_id: str, reason: FinishReason, error: str = "") -> RequestEnded:
        return RequestEnded(request_id, reason, error, str(self.requests_cursor))

    def _apply_result(self, result: StepResult) -> None:
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

    # ------------------------------------------------------------------ a step

    def _drain_those_at_their_limit(self, step: int) -> None:
        for group in self._reaches_limit.pop(step - 1, ()):
            if group.state is _S.DECODING and group.last_step == step - 1:
                group.move_to(_S.DRAINING)
                self._num_decoding -= len(group.sequences)

    def _open_blocks(self, draft: PlanDraft) -> None:
        """Give blocks to each group whose next tokens have no room in blocks of their own."""
        step = draft.step
        due: list[SequenceGroup] = []
        for group in self._opens_block.pop(step, ()):
            if group.state is _S.DECODING and group.next_block_step == step:
                group.next_block_step = 0  # preempted and back, it may be noted here twice
                due.append(group)
        tables = self._tables
        positions = [group.num_tokens + step - group.decode_from for group in due]
        needed = sum(map(tables.num_needed, due, positions))
        blocks = self.pool.allocate(needed)
        if blocks is None:
            self._open_blocks_by_rank(due, draft)
            return
        for group, position in zip(due, positions, strict=True):
            tables.make_room(group, position, blocks, draft)
            self._note_next_block(group, position, step)

    def _open_blocks_by_rank(self, due: list[SequenceGroup], draft: PlanDraft) -> None:
        """The same when not all can have what they need: the latest have to go."""
        for group in sorted(due, key=_BY_RANK):
            if group.state is not _S.DECODING:
                continue
            position = group.num_tokens + draft.step - group.decode_from
            blocks = self._blocks_for(group, position, draft)
            if blocks is not None:
                self._tables.make_room(group, position, blocks, draft)
                self._note_next_block(group, position, draft.step)

    def _blocks_for(
        self, group: SequenceGroup, position: int, draft: PlanDraft
    ) -> list[int] | None:
        """Free blocks, if need be from the latest; None if the group itself had to go."""
        needed = self._tables.num_needed(group, position)
        while (blocks := self.pool.allocate(needed)) is None:
            victim = next(
                found for found in reversed(self._running) if found.state is not _S.DRAINING
            )
            self._preempt(victim, group, draft)
            if victim is group:
                return None
        return blocks

    def _note_next_block(self, group: SequenceGroup, position: int, step: int) -> None:
        """``step`` has room to write at ``position``; note when the block is full."""
        due = step + self.config.block_size - position % self.config.block_size
        group.next_block_step = due
        if due <= group.last_step:
            self._opens_block[due].append(group)

    def _preempt(self, victim: SequenceGroup, beneficiary: SequenceGroup, draft: PlanDraft) -> None:
        lost = sum(victim.kv_tokens_at(self.planned_step, found) for found in victim.sequences)
        kind = self._kind_of_preemption(victim)
        note = notes.Preempted(victim.request_id, beneficiary.request_id, kind, lost)
        self._notes.append(note)
        if kind is Preemption.SWAP:
            self._tables.swap_out(victim, draft)
        self._wait_for_blocks(victim)

    def _wait_for_blocks(self, group: SequenceGroup) -> None:
        """A running group loses its blocks until it is admitted again."""
        self._stop_running(group)
        for sequence in group.sequences:
            self._give_up_blocks(group, sequence)
        group.move_to(_S.PREEMPTED)
        group.last_step = self.planned_step  # its results may come until then
        insort(self._preempted, group, key=_BY_RANK)

    def _kind_of_preemption(self, victim: SequenceGroup) -> Preemption:
        if victim.state is not _S.DECODING:
            return Preemption.RECOMPUTE  # half a prompt is not worth keeping
        num_blocks = self._tables.num_blocks_of(victim)
        return kind_of_preemption(self.config, num_blocks, self.host_pool.num_free)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        for group in list(self._prefilling):
            if draft.budget <= 0:
                return
            self._plan_chunks(group, draft)

    def _admit(self, draft: PlanDraft) -> None:
        while draft.budget > 0:
            group = self._next_to_admit()
            if group is None or self._tokens.num_free_slots < len(group.sequences):
                return
            reserve = self.config.num_watermark_blocks if self._running else 0
            group.prepare_prefill()
            if not self._get_blocks(group, reserve, draft):
                return
            self._open(group, draft)
            self._plan_chunks(group, draft)

    def _get_blocks(self, group: SequenceGroup, reserve: int, draft: PlanDraft) -> bool:
        """Blocks for all of a group, or nothing; what was swapped out comes back."""
        if group.is_swapped:
            return self._tables.swap_in(group, reserve, draft)
        return self._tables.admit(group, reserve)

    def _next_to_admit(self) -> SequenceGroup | None:
        if self._preempted:
            first = self._preempted[0]
            if first.last_step > self.applied_step:
                return None  # the tokens of its last plans are not in yet
            for sequence in first.sequences:
                self._hand_in_slot(sequence)
            return first
        while self._waiting and self._waiting[0][1].state is not _S.WAITING:
            heappop(self._waiting)  # ended while it waited
        return self._waiting[0][1] if self._waiting else None

    def _open(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Put a group that has just got its blocks into the plan."""
        if group.state is _S.WAITING:
            heappop(self._waiting)
            self._num_waiting -= 1
        else:
            self._preempted.remove(group)
        group.move_to(_S.PREFILLING)
        insort(self._running, group, key=_BY_RANK)
        insort(self._prefilling, group, key=_BY_RANK)
        for sequence in group.sequences:
            sequence.slot = self._tokens.open(sequence.handle, sequence.output)
        draft.admit(group)
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
        if plan_chunks(group, draft, self._tables):
            self._prefilling.remove(group)
            self._start_decoding(group, draft.step)

    def _start_decoding(self, group: SequenceGroup, step: int) -> None:
        """``step`` samples a token; from the next one on the group decodes by itself."""
        num_generated = group.num_tokens - group.num_prompt_tokens
        if num_generated == 0:
            self._samples_first[step].append(group)
        group.decode_from = step + 1
        group.last_step = step + group.max_output - num_generated - 1
        if group.last_step == step:
            group.move_to(_S.DRAINING)
            return
        group.move_to(_S.DECODING)
        self._num_decoding += len(group.sequences)
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
        """Forget a sequence; what it held is free for the next plan.

        A plan in flight may still compute it: plans are executed in order, so that is done before
        anybody else gets the blocks.
        """
        if group.state is _S.DECODING:
            self._num_decoding -= 1
        if len(group.sequences) == 1:
            self._leave_queues(group)
        self._give_up_blocks(group, sequence)
        self._tables.drop_swapped(sequence)
        self._hand_in_slot(sequence)
        group.sequences.remove(sequence)
        group.ended[sequence.choice] = EndedChoice(sequence.output, reason)
        del self._by_handle[sequence.handle]
        if not group.sequences:
            group.move_to(_S.ENDED)
            del self._by_request[group.request_id]
            self._retention.ended(group)
            num_generated = sum(len(found.output) for found in group.ended.values())
            self._notes.append(notes.Ended(group.request_id, reason, num_generated))

    def _leave_queues(self, group: SequenceGroup) -> None:
        """The last sequence of a group is about to end."""
        if group.state is _S.WAITING:
            self._num_waiting -= 1
        elif group.state is _S.PREEMPTED:
            self._preempted.remove(group)
        else:
            self._running.remove(group)
            if group.state is _S.PREFILLING:
                self._prefilling.remove(group)

    def _stop_running(self, group: SequenceGroup) -> None:
        """A running group is about to lose its blocks."""
        if group.state is _S.DECODING:
            self._num_decoding -= len(group.sequences)
        elif group.state is _S.PREFILLING:
            self._prefilling.remove(group)
        self._running.remove(group)

    def _give_up_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Free a sequence's blocks and have the worker forget it, if it has any."""
        if not sequence.block_table:
            return
        self._retired.append(sequence.handle)
        num_computed = sequence.num_planned
        if sequence.slot is not None and group.state is not _S.PREFILLING:
            # The last token that is known was sampled, but is not computed for sure.
            sequence.output = self._tokens.output(sequence.slot)
            num_computed = group.num_prompt_tokens + len(sequence.output) - 1
        self._tables.release(group, sequence, num_computed)

    def _hand_in_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            sequence.output = self._tokens.close(sequence.handle)
            sequence.slot = None
