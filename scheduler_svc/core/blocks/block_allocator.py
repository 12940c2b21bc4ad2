"""Blocks for the next tokens of groups that run, and who has to go where there are too few.

Interpreted work per step is proportional to what changed: a group whose sequences stay inside their
last blocks costs nothing. Its lengths follow from step numbers, and a calendar says in which step
it opens a block.
"""

from collections import defaultdict
from collections.abc import Callable

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.requests.feasibility import kind_of_preemption
from scheduler_svc.core.sequences.generated_tokens import TokenStore
from scheduler_svc.core.sequences.queues import BY_RANK, Queues
from scheduler_svc.core.sequences.running_searches import Searches
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    PREEMPTED,
    PREFILLING,
    Sequence,
    SequenceGroup,
)
from scheduler_svc.core.step.plan_draft import PlanDraft


class Room:
    """Gives and takes the blocks of running groups (PagedAttention, section 4.5).

    Args:
        config: limits.
        tables: of all groups.
        queues: who runs, and who waits.
        searches: beam searches among those that run.
        tokens: what sequences have generated.
        prefixes: pinned ones.
        note: takes what happened.
        drop_prefix: ends the request that computes a prefix which was given up, if there is one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        queues: Queues,
        searches: Searches,
        tokens: TokenStore,
        prefixes: PinnedPrefixes,
        note: Callable[[events.Note], None],
        drop_prefix: Callable[[str], None],
    ) -> None:
        self._config = config
        self._block_size = config.block_size
        self._tables = tables
        self._pool = tables.pool
        self._queues = queues
        self._searches = searches
        self._tokens = tokens
        self._prefixes = prefixes
        self._note = note
        self._drop_prefix = drop_prefix
        # By step. An entry may be out of date; whoever reads it checks.
        self._opens_block: defaultdict[int, list[SequenceGroup]] = defaultdict(list)

    # ---------------------------------------------------------------- to go on

    def make(self, draft: PlanDraft) -> None:
        """Give blocks to each group whose next tokens have no room in blocks of their own."""
        step = draft.step
        due = self._searches.take_due()
        for group in self._opens_block.pop(step, ()):
            if group.state is DECODING and group.next_block_step == step:
                group.next_block_step = 0  # preempted and back, it may be noted here twice
                due.append(group)
        if not due:
            return
        num_needed = num_inside = 0
        for group in due:
            position = group.next_position(step)
            if position % self._block_size:
                num_inside += 1
                num_needed += self._tables.num_needed(group, position)
            else:
                num_needed += len(group.sequences)
        blocks = self._pool.allocate(num_needed)
        if blocks is None:
            self._make_by_rank(due, draft)
        elif num_inside:
            for group in due:
                self._go_on(group, blocks, draft)
        else:
            self._open_blocks(due, blocks, draft)

    def search_on(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """The beams of a group have room for their last tokens."""
        draft.search(group)
        self._searches.planned(group, draft.step)

    def starts_decoding(self, group: SequenceGroup) -> None:
        """A group decodes from a later step on; note when it needs blocks."""
        # That step computes the token at position num_tokens: at a border it needs a new block,
        # and forks need room of their own.
        position = group.num_tokens
        if position % self._block_size == 0 or self._tables.num_needed(group, position):
            group.next_block_step = group.decode_from
            self._opens_block[group.decode_from].append(group)
        else:
            self._note_next_block(group, position, group.decode_from)

    def _open_blocks(self, due: list[SequenceGroup], blocks: list[int], draft: PlanDraft) -> None:
        """All of them write at the beginning of a block."""
        full_at = draft.step + self._block_size
        for group in due:
            for sequence in group.sequences:
                block = blocks.pop()
                sequence.block_table.append(block)
                draft.grown_handles.append(sequence.handle)
                draft.grown_blocks.append(block)
            if group.search is not None:
                self.search_on(group, draft)
                continue
            group.next_block_step = full_at
            if full_at <= group.last_step:
                self._opens_block[full_at].append(group)

    def _make_by_rank(self, due: list[SequenceGroup], draft: PlanDraft) -> None:
        """The same when not all can have what they need: the latest have to go."""
        for group in sorted(due, key=BY_RANK):
            if group.state is PREEMPTED:
                continue
            position = group.next_position(draft.step)
            blocks = self._blocks_for(group, position, draft)
            if blocks is not None:
                self._go_on(group, blocks, draft)

    def _blocks_for(
        self, group: SequenceGroup, position: int, draft: PlanDraft
    ) -> list[int] | None:
        """Free blocks, if need be from the latest; None if the group itself had to go."""
        needed = self._tables.num_needed(group, position)
        while (blocks := self._pool.allocate(needed)) is None:
            victim = self._queues.victim()
            is_earliest = group is self._queues.running[0]
            if victim is group and is_earliest and self.give_up_prefix(group):
                continue
            self._preempt(victim, group, draft)
            if victim is group:
                return None
        return blocks

    def _go_on(self, group: SequenceGroup, blocks: list[int], draft: PlanDraft) -> None:
        """Let a group write, in the last of these blocks as far as it needs any."""
        position = group.next_position(draft.step)
        self._tables.make_room(group, position, blocks, draft)
        if group.search is None:
            self._note_next_block(group, position, draft.step)
        else:
            self.search_on(group, draft)

    def _note_next_block(self, group: SequenceGroup, position: int, step: int) -> None:
        """``step`` has room to write at ``position``; note when the block is full."""
        due = step + self._block_size - position % self._block_size
        group.next_block_step = due
        if due <= group.last_step:
            self._opens_block[due].append(group)

    # --------------------------------------------------------------- to give up

    def give_up_prefix(self, beneficiary: SequenceGroup) -> bool:
        """Unpin a prefix for a group that would have to wait for ever; whether there was one."""
        prefix_id = self._prefixes.give_up(beneficiary)
        if prefix_id is None:
            return False
        self._drop_prefix(prefix_id)
        return True

    def take_back(self, group: SequenceGroup, planned_step: int) -> None:
        """A running group loses its blocks until it is admitted again.

        Args:
            planned_step: last step that was planned.
        """
        group.note_beams()
        group.parents = []
        for sequence in group.sequences:
            self.give_up_blocks(group, sequence)
        self._queues.preempt(group)
        group.last_step = planned_step  # its results may come until then

    def give_up_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Free a sequence's blocks, if it has any; the full ones stay findable."""
        if not sequence.block_table:
            return
        num_computed = sequence.num_planned
        if group.state is not PREFILLING:
            if sequence.slot is not None:
                sequence.output = self._tokens.output(sequence.slot)
            # The last token that is known was sampled, but is not computed for sure.
            num_computed = group.num_prompt_tokens + len(sequence.output) - 1
        self._tables.register_computed(group, sequence, num_computed)
        self._tables.give_up(sequence)

    def hand_in_slot(self, sequence: Sequence) -> None:
        """A sequence gets no more tokens until it is admitted again."""
        if sequence.slot is not None:
            sequence.output = self._tokens.close(sequence.handle)
            sequence.slot = None

    def _preempt(self, victim: SequenceGroup, beneficiary: SequenceGroup, draft: PlanDraft) -> None:
        if victim.serves_nobody:
            # As a preempted one it would hold up those that wait for the first time.
            self.give_up_blocks(victim, victim.sequences[0])
            self.hand_in_slot(victim.sequences[0])
            self._queues.wait_again(victim)
            return
        planned_step = draft.step - 1
        lost = sum(victim.kv_tokens_at(planned_step, found) for found in victim.sequences)
        kind = self._kind_of_preemption(victim)
        note = events.Preempted(victim.request_id, beneficiary.request_id, kind, lost)
        self._note(note)
        if kind is Preemption.SWAP:
            self._tables.swap_out(victim, draft)
        self.take_back(victim, planned_step)

    def _kind_of_preemption(self, victim: SequenceGroup) -> Preemption:
        if victim.state is PREFILLING:
            return Preemption.RECOMPUTE  # half a prompt is not worth keeping
        num_blocks = self._tables.num_blocks_of(victim)
        return kind_of_preemption(self._config, num_blocks, self._tables.host_pool.num_free)
