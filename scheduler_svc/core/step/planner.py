"""Carries out what the scheduling policy decides: fills the plans of steps and applies results.

Progress is a number of planned tokens that chases the number of tokens; prefill and decode are no
modes. Interpreted work per step is proportional to what changed: calendars hold the step in which a
group samples its first token, and the step in which it ends at the latest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import Preemption, ProtocolError, SchedulerConfig
from scheduler_svc.core.sequences.generated_tokens import TokenStore
from scheduler_svc.core.sequences.queues import Queues
from scheduler_svc.core.sequences.running_searches import RunningSearches
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    ENDED,
    FINISHING,
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
from shared.messages.plans import PlannedPreemption


class StepPlanner:
    """Moves sequence groups between their states, and writes each change into a plan.

    `SchedulingPolicy` chooses the groups.

    Args:
        config: limits.
        tables: block tables of all groups.
        prefixes: pinned ones.
        new_handle: gives every new sequence its handle.
        emit: takes each event.

    Attributes:
        planned_step: last step that was planned.
        applied_step: last step whose result was applied.
        queues: groups by state.
        blocks: gives running groups the blocks of their next tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        prefixes: PinnedPrefixes,
        new_handle: Callable[[], int],
        emit: Callable[[events.Event], None],
    ) -> None:
        self.planned_step = 0
        self.applied_step = 0
        self.queues = Queues(config)
        self._config = config
        self._tables = tables
        self._prefixes = prefixes
        self._emit = emit
        self._pool = tables.pool
        self._tokens = TokenStore(config.max_num_sequences, config.max_model_len)
        self._searches = RunningSearches(tables, new_handle)
        self.blocks = BlockAllocator(tables, self._searches, config.block_size)
        # The calendars, by step. Entries may be out of date and are checked when they are read.
        # Groups that end leave the first one, which may look far ahead.
        self._reaches_limit = Calendar()
        self._samples_first: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._survives: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        # The last group that got no blocks, and the state of the pool then.
        self._too_large: SequenceGroup | None = None
        self._num_changes = 0

    @property
    def is_full(self) -> bool:
        """Whether ``max_plans_in_flight`` plans are in flight."""
        return self.planned_step - self.applied_step >= self._config.max_plans_in_flight

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still be admitted."""
        return self._tokens.num_free_slots - self.queues.num_beams

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of the host pool that can be swapped out to."""
        return self._tables.host_pool.num_free

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Device blocks of a group, each counted once."""
        return self._tables.num_blocks_of(group)

    def new_draft(self) -> PlanDraft:
        """An empty draft of the next step."""
        return PlanDraft(self.planned_step + 1, self._config.max_num_batched_tokens)

    # ------------------------------------------------------------- results

    def apply(
        self, step: int, handles: IntArray, tokens: IntArray, beams: Iterable[BeamCandidates]
    ) -> list[SequenceGroup]:
        """Apply the tokens of the next step; return groups whose beam search is done.

        Raises:
            ProtocolError: a result of no plan.
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
            if group.state is not ENDED:
                self._emit(events.FirstToken(group.request_id))
        for group in self._survives.pop(step, ()):
            group.num_deaths = 0  # it got further than when a worker died
        return self._searches.apply(step, beams)

    def output(self, sequence: Sequence) -> IntArray:
        """Tokens that a sequence has generated."""
        return sequence.output if sequence.slot is None else self._tokens.output(sequence.slot)

    def suspects(self) -> list[int]:
        """Handles in plans in flight; if the worker has died, one of them may be the cause."""
        if self.planned_step == self.applied_step:
            return []
        found = [
            sequence.handle
            for group in self.queues.running
            for sequence in group.sequences
            if sequence.is_resident
        ]
        return found + [group.handle for group in self.queues.running if group.search is not None]

    # ------------------------------------------------------------- endings

    def end_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        """End a sequence; its blocks and its slot are free for the next plan."""
        if group.state is PREFILLING and len(group.sequences) > 1:
            self._leave_prefill(group, sequence)
        self._too_large = None  # it may be this group, which is smaller now
        self._release_blocks(group, sequence)
        self._tables.release_swapped(sequence)
        self._release_slot(sequence)
        if len(group.sequences) == 1:
            self._reaches_limit.drop(group)
            self.queues.end(group)
        else:
            self.queues.end_sequence(group)
        group.sequences.remove(sequence)
        self.queues.update_slots(group)

    def end_search(self, group: SequenceGroup) -> None:
        """End a beam search, done or not."""
        for sequence in group.sequences:
            self._tables.release(sequence)
            self._tables.release_swapped(sequence)
        self.queues.end(group)
        group.sequences = []

    def replace(self, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Give a group other sequences, which have all their tokens but no blocks."""
        self._too_large = None
        if group.state not in (WAITING, PREEMPTED):
            self._take_blocks(group, self.planned_step)
        for sequence in group.sequences:
            self._tables.release_swapped(sequence)
            self._release_slot(sequence)
        group.sequences = sequences
        self.queues.update_slots(group)

    def _leave_prefill(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Take a sequence that is about to end out of its group's prefill."""
        if sequence not in group.prefilled:
            return
        index = group.prefilled.index(sequence)
        del group.prefilled[index]
        if any(later.num_planned > sequence.num_planned for later in group.prefilled[index:]):
            # They may share blocks that it has not filled yet: all of them start over.
            lost = sum(found.num_planned for found in group.sequences)
            request_id = group.request_id
            self._emit(events.Preempted(request_id, request_id, Preemption.RECOMPUTE, lost))
            self._take_blocks(group, self.planned_step)

    # ------------------------------------------------------ a step's decisions

    def finish_at_limit(self, step: int) -> None:
        """Stop decoding groups whose last possible token is in the plan before ``step``."""
        for group in self._reaches_limit.take(step - 1):
            if group.state is DECODING and group.last_step == step - 1:
                self.queues.finish(group)

    def preempt(
        self,
        victim: SequenceGroup,
        beneficiary: SequenceGroup,
        kind: Preemption,
        draft: PlanDraft,
    ) -> None:
        """Take a running group's blocks for another group, which may be the same."""
        planned_step = draft.step - 1
        lost = sum(victim.kv_tokens_at(planned_step, found) for found in victim.sequences)
        by = beneficiary.request_id
        self._emit(events.Preempted(victim.request_id, by, kind, lost))
        draft.preemptions.append(
            PlannedPreemption(
                request_id=victim.request_id,
                by=by,
                kind=kind.value,
                num_tokens=lost,
                num_blocks=self.num_blocks_of(victim),
                num_free_blocks=self._pool.num_free,
                num_free_host_blocks=self.num_free_host_blocks,
                is_displaced=beneficiary.state is WAITING,
            )
        )
        if kind is Preemption.SWAP:
            self._tables.swap_out(victim, draft)
        self._take_blocks(victim, planned_step)

    def requeue(self, group: SequenceGroup) -> None:
        """Move a running group that computes a pinned prefix back to the waiting ones.

        As a preempted group it would hold up those that wait for the first time.
        """
        self._release_blocks(group, group.sequences[0])
        self._release_slot(group.sequences[0])
        self.queues.requeue(group)

    def give_up_prefix(self, beneficiary: SequenceGroup, draft: PlanDraft) -> bool:
        """Unpin a prefix for a group that could never run otherwise; whether there was one.

        If a group still computes the prefix, it ends and is added to ``draft.dropped``.
        """
        found = self._prefixes.give_up(beneficiary)
        if found is None:
            return False
        group = found.group
        if group is not None and group.state is not ENDED:
            sequence = group.sequences[0]
            self.end_sequence(group, sequence)
            draft.dropped.append((group, sequence))
        return True

    def free_slots_of_preempted(self, group: SequenceGroup) -> bool:
        """Free a preempted group's slots once the results of all its plans are applied.

        Returns:
            Whether they are.
        """
        if group.last_step > self.applied_step:
            return False
        for sequence in group.sequences:
            self._release_slot(sequence)
        return True

    def allocate(self, group: SequenceGroup, watermark: int, draft: PlanDraft) -> bool:
        """Get blocks for all tokens of a waiting or preempted group, or none.

        Args:
            watermark: blocks that must stay free.
        """
        if (
            group is self._too_large
            and self._pool.num_changes == self._num_changes
            and self.queues.running  # otherwise prefixes can be given up for it
        ):
            return False  # nothing has changed, as in most steps
        group.prepare_prefill()
        if group.is_swapped:
            fits = self._tables.swap_in(group, watermark, draft)
        else:
            fits = self._tables.admit(group, watermark)
        if not fits:
            self._too_large, self._num_changes = group, self._pool.num_changes
        return fits

    def admit(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Put a group that has just got its blocks into the plan."""
        self.queues.admit(group)
        if group.search is None:
            for sequence in group.sequences:
                sequence.slot = self._tokens.open(sequence.handle, sequence.output)
        draft.admit(group)
        self._prefixes.touch(group)
        if group.computes_prefix:
            return
        again = group.was_admitted or group.num_tokens > group.num_prompt_tokens
        num_tokens = group.num_tokens * len(group.prefilled)
        num_reused = sum(sequence.num_planned for sequence in group.prefilled)
        if not again:
            self.queues.tenants.charge_prompt(group, num_tokens - num_reused)
        tenant = group.submit.tenant
        self._emit(events.Admitted(group.request_id, again, num_tokens, num_reused, tenant))
        group.was_admitted = True

    def prefill(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Plan a group's next tokens as far as the budget allows; after the last it decodes."""
        if not plan_chunks(group, draft, self._tables):
            return
        if group.search is None:
            self._start_decoding(group, draft.step)
            return
        if group.num_deaths:
            self._survives[draft.step].append(group)
        self.queues.prefilled(group, SEARCHING)
        self.blocks.plan_beams(group, draft)

    def _start_decoding(self, group: SequenceGroup, step: int) -> None:
        """Let a group decode: ``step`` samples its first token, later steps compute one each."""
        num_generated = group.num_tokens - group.num_prompt_tokens
        if num_generated == 0 and not group.computes_prefix:
            self._samples_first[step].append(group)
        group.decode_from = step + 1
        group.last_step = step + group.max_output - num_generated - 1
        if group.num_deaths:
            self._survives[min(group.decode_from, group.last_step)].append(group)
        if group.last_step == step:
            self.queues.prefilled(group, FINISHING)
            return
        self.queues.prefilled(group, DECODING)
        self._reaches_limit.put(group, group.last_step)
        self.blocks.schedule_growth(group)

    # -------------------------------------------------------- blocks and slots

    def _take_blocks(self, group: SequenceGroup, planned_step: int) -> None:
        """Free a running group's blocks; it is preempted until it is admitted again.

        Args:
            planned_step: last step that was planned.
        """
        group.store_beam_outputs()
        group.parents = []
        for sequence in group.sequences:
            self._release_blocks(group, sequence)
        self.queues.preempt(group)
        group.last_step = planned_step  # its results may come until then

    def _release_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Free a sequence's blocks, if it has any; the full ones stay findable."""
        if not sequence.block_table:
            return
        num_computed = sequence.num_planned
        if group.state is not PREFILLING:
            if sequence.slot is not None:
                sequence.output = self._tokens.output(sequence.slot)
            # The last token that is known was sampled, but may not be computed.
            num_computed = group.num_prompt_tokens + len(sequence.output) - 1
        self._tables.register_computed(group, sequence, num_computed)
        self._tables.release(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        """Free a sequence's slot, if it has one, and keep its tokens."""
        if sequence.slot is not None:
            sequence.output = self._tokens.close(sequence.handle)
            sequence.slot = None
