"""The scheduler core: who computes what next, on which blocks.

Pure: no clock, no log, no Redis. The service feeds it what it read, and publishes what it returns;
the same calls with the same arguments give the same plans.

Progress is a number of planned tokens that chases the number of tokens; prefill and decode are no
modes. Interpreted work per step is proportional to what changed: a sequence that stays inside its
last block costs nothing. Its lengths follow from step numbers, and two calendars say in which step
it opens a block and in which one it ends at the latest.
"""

from bisect import insort
from collections import defaultdict, deque
from operator import attrgetter

import numpy as np

from scheduler_svc.core import notes
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import ProtocolError, SchedulerConfig
from scheduler_svc.core.draft import PlanDraft
from scheduler_svc.core.retention import Retention
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.tokens import TokenStore
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages import (
    Abort,
    Admission,
    ChoiceState,
    EndFlag,
    FinishReason,
    RequestEnded,
    RequestState,
    StepPlan,
    StepResult,
    Stop,
    Submit,
)

_S = SequenceState
_BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """FCFS continuous batching over a paged pool, with preemption by recomputation.

    Policy (PagedAttention, section 4.5): the earliest arrivals are served first, the latest are
    preempted first, and nobody new is admitted while a preempted sequence waits.
    """

    def __init__(self, config: SchedulerConfig, requests_cursor: EntryId = START) -> None:
        self.config = config
        self.requests_cursor = requests_cursor
        self.outputs_cursor = START
        self.planned_step = 0
        self.applied_step = 0
        self.pool = BlockPool(config.num_blocks)
        self._tokens = TokenStore(config.max_num_sequences, config.max_model_len)
        self._retention = Retention(config.outputs_retention)
        self._by_request: dict[str, Sequence] = {}
        self._by_handle: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._num_waiting = 0  # without those in the deque that have ended
        self._preempted: list[Sequence] = []  # by arrival
        self._prefilling: list[Sequence] = []  # by arrival
        self._running: list[Sequence] = []  # all that hold blocks, by arrival
        self._num_decoding = 0
        self._next_handle = 1
        self._retired: list[int] = []  # handles that the next plan takes from the worker
        # The calendars, by step. An entry may be out of date; whoever reads it checks.
        self._opens_block: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._reaches_limit: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._samples_first: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._notes: list[notes.Note] = []

    # ------------------------------------------------------------ what came in

    def recover(self, submit: Submit, output: IntArray) -> list[Message]:
        """Take over an unfinished request of an earlier epoch; what to append to outputs."""
        return self._accept(submit, output)

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
                if (sequence := self._by_request.get(event.submit.request_id)) is not None:
                    self._retention.stated(sequence, at)
                return []
            case Submit():
                self.requests_cursor = at
                return self._accept(event, np.empty(0, np.int32))
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
        if num_decoding == 0 and not draft.chunk_handles:
            return None
        self.planned_step = step
        retired, self._retired = self._retired, []
        return draft.finish(
            now_ms,
            self.requests_cursor,
            self.outputs_cursor,
            self._retention.min_id(self.outputs_cursor),
            retired,
        )

    def checkpoints(self) -> list[RequestState]:
        """Fresh RequestStates of requests whose old ones hold the outputs log back.

        They hold good only right behind ``outputs_cursor``: append them with exactly the next id.
        """
        return [self.state_of(found) for found in self._retention.overdue(self.outputs_cursor)]

    def state_of(self, sequence: Sequence) -> RequestState:
        """All that the log must know of an unfinished request."""
        output = sequence.output
        if sequence.slot is not None:
            output = self._tokens.output(sequence.slot)
        return RequestState(
            submit=sequence.submit,
            choices=(ChoiceState(sequence.handle, output, finish_reason=""),),
            requests_cursor=str(self.requests_cursor),
        )

    def take_notes(self) -> list[notes.Note]:
        """What happened since the last call, for logs and metrics."""
        taken, self._notes = self._notes, []
        return taken

    def stats(self) -> notes.Stats:
        """Queues and pool right now; looks at every running sequence."""
        return notes.Stats(
            num_running=len(self._running),
            num_waiting=self._num_waiting + len(self._preempted),
            num_used_blocks=self.pool.num_used,
            num_kv_tokens=sum(found.kv_tokens_at(self.planned_step) for found in self._running),
        )

    # ------------------------------------------------------------------ events

    def _accept(self, submit: Submit, output: IntArray) -> list[Message]:
        if submit.request_id in self._by_request:
            return []
        num_prompt = len(submit.prompt)
        max_output = min(submit.sampling.max_tokens, self.config.max_model_len - num_prompt)
        if (reason := self._why_never(num_prompt, max_output)) is not None:
            self._notes.append(notes.Refused(submit.request_id, reason))
            return [self._ended(submit.request_id, FinishReason.ERROR, reason)]
        if len(output) >= max_output:  # recovered into a smaller context than it had
            return [self._ended(submit.request_id, FinishReason.LENGTH)]
        handle = self._next_handle
        self._next_handle += 1
        sequence = Sequence(submit, handle, handle, max_output, output)
        self._by_request[submit.request_id] = sequence
        self._by_handle[handle] = sequence
        self._waiting.append(sequence)
        self._num_waiting += 1
        self._notes.append(notes.Accepted(submit.request_id, num_prompt))
        return [self.state_of(sequence)]

    def _why_never(self, num_prompt: int, max_output: int) -> str | None:
        """Why a request can never run, or None."""
        if num_prompt == 0:
            return "the prompt is empty"
        if max_output < 1:
            return (
                f"the prompt has {num_prompt} tokens, the model's context is "
                f"{self.config.max_model_len} tokens"
            )
        # The last token is sampled but never computed: it needs no slot.
        needed = self.config.blocks_for(num_prompt + max_output - 1)
        if needed > self.config.num_blocks:
            return (
                f"{num_prompt} prompt tokens and {max_output} to generate need {needed} KV blocks, "
                f"the pool has {self.config.num_blocks}"
            )
        return None

    def _stop(self, stop: Stop) -> list[Message]:
        sequence = self._by_request.get(stop.request_id)
        if sequence is None:
            return []
        self._end(sequence, FinishReason.STOP)
        return [self._ended(stop.request_id, FinishReason.STOP)]

    def _abort(self, abort: Abort) -> list[Message]:
        sequence = self._by_request.get(abort.request_id)
        if sequence is None or sequence.submit.attachment != abort.attachment:
            return []
        self._end(sequence, FinishReason.ABORT)
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
        for sequence in self._samples_first.pop(result.step, ()):
            self._notes.append(notes.FirstToken(sequence.request_id))
        for handle, flag in zip(ended_handles, flags, strict=False):
            if (ended := self._by_handle.get(handle)) is not None:
                self._end(ended, flag.finish_reason())

    # ------------------------------------------------------------------ a step

    def _drain_those_at_their_limit(self, step: int) -> None:
        for sequence in self._reaches_limit.pop(step - 1, ()):
            if sequence.state is _S.DECODING and sequence.last_step == step - 1:
                sequence.move_to(_S.DRAINING)
                self._num_decoding -= 1

    def _open_blocks(self, draft: PlanDraft) -> None:
        """Give a block to each sequence whose next token does not fit its last one."""
        step = draft.step
        due = self._opens_block.pop(step, None)
        if due is None:
            return
        due.sort(key=_BY_ARRIVAL)
        for sequence in due:
            if sequence.state is not _S.DECODING or sequence.next_block_step != step:
                continue
            block = self._block_for(sequence)
            if block is None:
                continue
            sequence.block_table.append(block)
            draft.grow(sequence.handle, block)
            self._note_next_block(sequence, step + self.config.block_size)

    def _block_for(self, sequence: Sequence) -> int | None:
        """A block, if need be from the latest arrivals; None if the sequence itself had to go."""
        while (blocks := self.pool.allocate(1)) is None:
            victim = next(
                found for found in reversed(self._running) if found.state is not _S.DRAINING
            )
            self._preempt(victim, sequence)
            if victim is sequence:
                return None
        return blocks[0]

    def _preempt(self, victim: Sequence, beneficiary: Sequence) -> None:
        lost = victim.kv_tokens_at(self.planned_step)
        self._notes.append(notes.Preempted(victim.request_id, beneficiary.request_id, lost))
        self._give_up_blocks(victim)
        victim.move_to(_S.PREEMPTED)
        victim.last_step = self.planned_step  # its results may come until then
        insort(self._preempted, victim, key=_BY_ARRIVAL)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        while self._prefilling and draft.budget > 0:
            self._plan_chunk(self._prefilling[0], draft)

    def _admit(self, draft: PlanDraft) -> None:
        while draft.budget > 0 and self._tokens.num_free_slots > 0:
            sequence = self._next_to_admit()
            if sequence is None or not self._take_blocks(sequence):
                return
            self._open(sequence, draft)
            self._plan_chunk(sequence, draft)

    def _next_to_admit(self) -> Sequence | None:
        if self._preempted:
            first = self._preempted[0]
            if first.last_step > self.applied_step:
                return None  # the tokens of its last plans are not in yet
            self._hand_in_slot(first)
            return first
        while self._waiting and self._waiting[0].state is not _S.WAITING:
            self._waiting.popleft()  # ended while it waited
        return self._waiting[0] if self._waiting else None

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all the tokens there are."""
        num_tokens = len(sequence.submit.prompt) + len(sequence.output)
        needed = self.config.blocks_for(num_tokens)
        reserve = self.config.num_watermark_blocks if self._running else 0
        if needed + reserve > self.pool.num_free:
            return False
        blocks = self.pool.allocate(needed)
        assert blocks is not None
        sequence.block_table = blocks
        return True

    def _open(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Put a sequence that has just got its blocks into the plan."""
        if sequence.state is _S.WAITING:
            self._waiting.popleft()
            self._num_waiting -= 1
        else:
            self._preempted.remove(sequence)
        sequence.move_to(_S.PREFILLING)
        sequence.num_tokens = len(sequence.submit.prompt) + len(sequence.output)
        sequence.num_planned = 0
        sequence.slot = self._tokens.open(sequence.handle, sequence.output)
        insort(self._running, sequence, key=_BY_ARRIVAL)
        insort(self._prefilling, sequence, key=_BY_ARRIVAL)
        draft.admissions.append(
            Admission(
                handle=sequence.handle,
                choice=0,
                tokens=np.concatenate([sequence.submit.prompt, sequence.output]),
                num_prompt_tokens=len(sequence.submit.prompt),
                num_computed=0,
                block_table=np.array(sequence.block_table, np.int32),
                sampling=sequence.submit.sampling,
            )
        )
        again = sequence.was_admitted or len(sequence.output) > 0
        recomputed = sequence.num_tokens if again else 0
        self._notes.append(notes.Admitted(sequence.request_id, again, recomputed))
        sequence.was_admitted = True

    def _plan_chunk(self, sequence: Sequence, draft: PlanDraft) -> None:
        """As many of a sequence's next tokens as the budget allows."""
        num_tokens = min(sequence.num_tokens - sequence.num_planned, draft.budget)
        draft.chunk(sequence.handle, num_tokens)
        sequence.num_planned += num_tokens
        if sequence.num_planned == sequence.num_tokens:
            self._prefilling.remove(sequence)
            self._start_decoding(sequence, draft.step)

    def _start_decoding(self, sequence: Sequence, step: int) -> None:
        """``step`` samples a token; from the next one on the sequence decodes by itself."""
        num_generated = len(sequence.output)
        if num_generated == 0:
            self._samples_first[step].append(sequence)
        sequence.decode_from = step + 1
        sequence.last_step = step + sequence.max_output - num_generated - 1
        if sequence.last_step == step:
            sequence.move_to(_S.DRAINING)
            return
        sequence.move_to(_S.DECODING)
        self._num_decoding += 1
        self._reaches_limit[sequence.last_step].append(sequence)
        # Step decode_from computes the token at position num_tokens.
        slots_left = -sequence.num_tokens % self.config.block_size
        self._note_next_block(sequence, sequence.decode_from + slots_left)

    def _note_next_block(self, sequence: Sequence, step: int) -> None:
        sequence.next_block_step = step
        if step <= sequence.last_step:
            self._opens_block[step].append(sequence)

    # --------------------------------------------------------------- an ending

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Forget a request; what it held is free for the next plan.

        A plan in flight may still compute it: plans are executed in order, so that is done before
        anybody else gets the blocks.
        """
        if sequence.state is _S.WAITING:
            self._num_waiting -= 1
        elif sequence.state is _S.PREEMPTED:
            self._preempted.remove(sequence)
        else:
            self._give_up_blocks(sequence)
        self._hand_in_slot(sequence)
        sequence.move_to(_S.ENDED)
        del self._by_request[sequence.request_id]
        del self._by_handle[sequence.handle]
        self._retention.ended(sequence)
        self._notes.append(notes.Ended(sequence.request_id, reason, len(sequence.output)))

    def _give_up_blocks(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence and have the worker forget it."""
        if sequence.state is _S.DECODING:
            self._num_decoding -= 1
        elif sequence.state is _S.PREFILLING:
            self._prefilling.remove(sequence)
        self._running.remove(sequence)
        self._retired.append(sequence.handle)
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _hand_in_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            sequence.output = self._tokens.close(sequence.handle)
            sequence.slot = None
