"""Which groups compute in which step.

Progress is a number of planned tokens that chases the number of tokens; prefill and decode are no
modes. Interpreted work per step is proportional to what changed: calendars say in which step a
group samples its first token, and in which it ends at the latest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_allocator import Room
from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import Preemption, ProtocolError, SchedulerConfig
from scheduler_svc.core.sequences.generated_tokens import TokenStore
from scheduler_svc.core.sequences.queues import Queues
from scheduler_svc.core.sequences.running_searches import Searches
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    DRAINING,
    PREEMPTED,
    PREFILLING,
    SEARCHING,
    WAITING,
    Sequence,
    SequenceGroup,
)
from scheduler_svc.core.step.calendar import Calendar
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.core.step.prefill_chunks import plan_chunks
from shared.codec import IntArray
from shared.messages.outputs import BeamCandidates

# A request that was computed when a worker died, and again when the next one did, has the third to
# itself until it has got further.
ALONE_AFTER = 2


class Stepping:
    """Policy (PagedAttention, section 4.5): by priority and then by arrival the earliest are served
    first and the latest preempted first; a group's sequences run together or not at all. What was
    preempted and what was never admitted wait in one order: a preempted group is passed by groups
    of a better rank only. A group that lacks seats is passed by others for a while, see
    ``WaitingQueue``; one that lacks blocks is not.

    Args:
        config: limits.
        tables: of all groups.
        prefixes: pinned ones.
        new_handle: gives every new sequence its handle.
        note: takes what happened.
        drop_prefix: ends the request that computes a prefix which was given up, if there is one.

    Attributes:
        planned_step: last step that was planned.
        applied_step: last step whose result was applied.
        is_draining: nobody is admitted for the first time any more.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        prefixes: PinnedPrefixes,
        new_handle: Callable[[], int],
        note: Callable[[events.Note], None],
        drop_prefix: Callable[[str], None],
    ) -> None:
        self.planned_step = 0
        self.applied_step = 0
        self.is_draining = False
        self.queues = Queues(config)
        self._config = config
        self._tables = tables
        self._prefixes = prefixes
        self._note = note
        self._pool = tables.pool
        self._tokens = TokenStore(config.max_num_sequences, config.max_model_len)
        self._searches = Searches(tables, new_handle)
        self._room = Room(
            config, tables, self.queues, self._searches, self._tokens, prefixes, note, drop_prefix
        )
        # The calendars, by step. An entry may be out of date; whoever reads it checks. What ends
        # leaves the first, which may look far ahead.
        self._reaches_limit = Calendar()
        self._samples_first: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._survives: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        # Who was looked at in vain to be admitted, and what the pool's chances were then.
        self._too_large: SequenceGroup | None = None
        self._num_chances = 0

    @property
    def is_full(self) -> bool:
        """As many plans are in flight as may be."""
        return self.planned_step - self.applied_step >= self._config.max_plans_in_flight

    def plan(self) -> PlanDraft | None:
        """The next step, None if there is nothing to compute."""
        draft = PlanDraft(self.planned_step + 1, self._config.max_num_batched_tokens)
        self._drain_those_at_their_limit(draft.step)
        self._room.make(draft)
        num_decoding = self.queues.num_decoding
        draft.budget -= num_decoding
        draft.prompt_budget = draft.budget
        if self._config.max_prompt_tokens and (num_decoding or draft.beams):
            draft.prompt_budget = min(draft.budget, self._config.max_prompt_tokens)
        self._continue_prefills(draft)
        self._admit(draft)
        if num_decoding == 0 and draft.is_empty:
            return None
        self.planned_step = draft.step
        return draft

    def apply(
        self, step: int, handles: IntArray, tokens: IntArray, beams: Iterable[BeamCandidates]
    ) -> list[SequenceGroup]:
        """Take in the tokens of the next step; groups whose beam search is done.

        Raises:
            ProtocolError: a result that no plan asked for.
        """
        if step != self.applied_step + 1 or step > self.planned_step:
            raise ProtocolError(
                f"result of step {step}: {self.applied_step} steps are applied, "
                f"{self.planned_step} planned"
            )
        self.applied_step = step
        try:
            self._tokens.append(handles, tokens)
        except IndexError as error:
            raise ProtocolError(f"result of step {step}: {error}") from None
        for group in self._samples_first.pop(step, ()):
            self._note(events.FirstToken(group.request_id))
        for group in self._survives.pop(step, ()):
            group.num_deaths = 0  # as far as it got before, and a step more
        return self._searches.apply(step, beams)

    def output(self, sequence: Sequence) -> IntArray:
        """Tokens that a sequence has generated."""
        return sequence.output if sequence.slot is None else self._tokens.output(sequence.slot)

    def suspects(self) -> list[int]:
        """Handles in plans whose results are not known: if the worker is dead, of these."""
        if self.planned_step == self.applied_step:
            return []
        found = [
            sequence.handle
            for group in self.queues.running
            for sequence in group.sequences
            if sequence.is_resident
        ]
        return found + [group.handle for group in self.queues.running if group.search is not None]

    # --------------------------------------------------------------- endings

    def end_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        """A sequence is over; what it held is free for the next plan."""
        if group.state is PREFILLING and len(group.sequences) > 1:
            self._leave_prefill(group, sequence)
        self._too_large = None  # it may be this group, which is smaller now
        self._room.give_up_blocks(group, sequence)
        self._tables.drop_swapped(sequence)
        self._room.hand_in_slot(sequence)
        if len(group.sequences) == 1:
            self._reaches_limit.drop(group)
            self.queues.end(group)
        else:
            self.queues.end_sequence(group)
        group.sequences.remove(sequence)
        self.queues.file_anew(group)

    def end_search(self, group: SequenceGroup) -> None:
        """A beam search is over, whatever it has found."""
        for sequence in group.sequences:
            self._tables.give_up(sequence)
            self._tables.drop_swapped(sequence)
        self.queues.end(group)
        group.sequences = []

    def replace(self, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Let a group go on with other sequences, that have all their tokens but no blocks."""
        self._too_large = None
        if group.state not in (WAITING, PREEMPTED):
            self._room.take_back(group, self.planned_step)
        for sequence in group.sequences:
            self._tables.drop_swapped(sequence)
            self._room.hand_in_slot(sequence)
        group.sequences = sequences
        self.queues.file_anew(group)

    def _leave_prefill(self, group: SequenceGroup, sequence: Sequence) -> None:
        """One of several sequences that are computed again is about to end."""
        if sequence not in group.prefilled:
            return
        index = group.prefilled.index(sequence)
        del group.prefilled[index]
        if any(later.num_planned > sequence.num_planned for later in group.prefilled[index:]):
            # They may count on blocks that it was to fill: all of them start over.
            lost = sum(found.num_planned for found in group.sequences)
            request_id = group.request_id
            self._note(events.Preempted(request_id, request_id, Preemption.RECOMPUTE, lost))
            self._room.take_back(group, self.planned_step)

    # ------------------------------------------------------------------ a step

    def _drain_those_at_their_limit(self, step: int) -> None:
        for group in self._reaches_limit.take(step - 1):
            if group.state is DECODING and group.last_step == step - 1:
                self.queues.drain(group)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        for group in self.queues.prefilling.copy():
            if draft.prompt_budget <= 0:
                return
            self._plan_chunks(group, draft)

    def _admit(self, draft: PlanDraft) -> None:
        while draft.prompt_budget > 0 and not self._is_one_alone:
            group = self._next_to_admit(draft.step)
            if group is None or self._num_free_seats < group.num_seats:
                return
            if group.num_deaths >= ALONE_AFTER and self.queues.running:
                return
            if self._is_still_too_large(group):
                return
            reserve = self._config.num_watermark_blocks if self.queues.running else 0
            group.prepare_prefill()
            while not self._get_blocks(group, reserve, draft):
                is_alone = not self.queues.running and not group.serves_nobody
                if not is_alone or not self._room.give_up_prefix(group):
                    self._too_large, self._num_chances = group, self._pool.num_chances
                    return
            self._open(group, draft)
            self._plan_chunks(group, draft)

    def _is_still_too_large(self, group: SequenceGroup) -> bool:
        """There is no need to look again: most steps give nobody's blocks back."""
        return (
            group is self._too_large
            and self._pool.num_chances == self._num_chances
            and len(self.queues.running) > 0  # or else prefixes are given up for it
        )

    def _get_blocks(self, group: SequenceGroup, reserve: int, draft: PlanDraft) -> bool:
        """Blocks for all of a group, or nothing; what was swapped out comes back."""
        if group.is_swapped:
            return self._tables.swap_in(group, reserve, draft)
        return self._tables.admit(group, reserve)

    @property
    def _num_free_seats(self) -> int:
        """Sequences that may still be admitted."""
        return self._tokens.num_free_slots - self.queues.num_beams

    @property
    def _is_one_alone(self) -> bool:
        """Whether there runs a group that may be what killed workers."""
        running = self.queues.running
        return len(running) > 0 and running[0].num_deaths >= ALONE_AFTER

    def _next_to_admit(self, step: int) -> SequenceGroup | None:
        """The first by rank of those that wait to be admitted, for the first time or again."""
        preempted = self.queues.preempted[0] if self.queues.preempted else None
        is_complete = preempted is not None and preempted.last_step <= self.applied_step
        if preempted is not None and is_complete:
            for sequence in preempted.sequences:  # their seats are free for others, too
                self._room.hand_in_slot(sequence)
        waiting = None
        if not self.is_draining:
            waiting = self.queues.first_waiting(self._num_free_seats, step)
        if preempted is None or (waiting is not None and waiting.rank < preempted.rank):
            return waiting
        return preempted if is_complete else None  # else tokens of its last plans are not in yet

    def _open(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Put a group that has just got its blocks into the plan."""
        self.queues.admit(group)
        if group.search is None:
            for sequence in group.sequences:
                sequence.slot = self._tokens.open(sequence.handle, sequence.output)
        draft.admit(group)
        self._prefixes.used_by(group)
        if group.serves_nobody:
            return
        num_output = group.num_tokens - group.num_prompt_tokens
        self._note(
            events.Admitted(
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
        if group.num_deaths:
            self._survives[draft.step].append(group)
        self.queues.prefilled(group, SEARCHING)
        self._room.search_on(group, draft)

    def _start_decoding(self, group: SequenceGroup, step: int) -> None:
        """``step`` samples a token; from the next one on the group decodes by itself."""
        num_generated = group.num_tokens - group.num_prompt_tokens
        if num_generated == 0 and not group.serves_nobody:
            self._samples_first[step].append(group)
        group.decode_from = step + 1
        group.last_step = step + group.max_output - num_generated - 1
        if group.num_deaths:
            self._survives[min(group.decode_from, group.last_step)].append(group)
        if group.last_step == step:
            self.queues.prefilled(group, DRAINING)
            return
        self.queues.prefilled(group, DECODING)
        self._reaches_limit.put(group, group.last_step)
        self._room.starts_decoding(group)
