"""Gives running groups the blocks that their next tokens need.

Interpreted work per step is proportional to what changed: a group whose sequences stay inside their
last blocks costs nothing. Its lengths follow from step numbers, and a calendar holds the step in
which it opens a block.
"""

from collections import defaultdict

from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.sequences.running_searches import RunningSearches
from scheduler_svc.core.sequences.sequence import DECODING, SequenceGroup
from scheduler_svc.core.step.plan_draft import PlanDraft


class BlockAllocator:
    """Allocates blocks for groups that decode or search (PagedAttention, section 4.5).

    Args:
        tables: block tables of all groups.
        searches: beam searches of running groups.
        block_size: tokens of a block.
    """

    def __init__(self, tables: BlockTables, searches: RunningSearches, block_size: int) -> None:
        self._block_size = block_size
        self._tables = tables
        self._pool = tables.pool
        self._searches = searches
        # By step. Entries may be out of date and are checked when they are read.
        self._opens_block: defaultdict[int, list[SequenceGroup]] = defaultdict(list)

    def due(self, step: int) -> list[SequenceGroup]:
        """Groups whose next tokens need new blocks or copies; call it once for each step."""
        due = self._searches.take_due()
        for group in self._opens_block.pop(step, ()):
            if group.state is DECODING and group.next_block_step == step:
                group.next_block_step = 0  # admitted again, it may be here twice
                due.append(group)
        return due

    def grow_all(self, due: list[SequenceGroup], draft: PlanDraft) -> bool:
        """Allocate the blocks of all these groups; False, and no change, if too few are free."""
        step = draft.step
        num_needed = num_inside = 0
        for group in due:
            position = group.next_position(step)
            if position % self._block_size:
                num_inside += 1
                num_needed += self._tables.num_blocks_needed(group, position)
            else:
                num_needed += len(group.sequences)
        blocks = self._pool.allocate(num_needed)
        if blocks is None:
            return False
        if num_inside:
            for group in due:
                self._use_blocks(group, group.next_position(step), blocks, draft)
        else:
            self._open_blocks(due, blocks, draft)
        return True

    def grow(self, group: SequenceGroup, draft: PlanDraft) -> bool:
        """Allocate the blocks of one group; False, and no change, if too few are free."""
        position = group.next_position(draft.step)
        blocks = self._pool.allocate(self._tables.num_blocks_needed(group, position))
        if blocks is None:
            return False
        self._use_blocks(group, position, blocks, draft)
        return True

    def plan_beams(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Compute the last tokens of a group's beams, which have blocks for them, in this step."""
        draft.search(group)
        self._searches.planned(group, draft.step)

    def schedule_growth(self, group: SequenceGroup) -> None:
        """Enter a group that decodes from a later step on into the calendar."""
        # That step computes the token at position num_tokens: at a border it needs a new block,
        # and forks need blocks of their own.
        position = group.num_tokens
        if position % self._block_size == 0 or self._tables.num_blocks_needed(group, position):
            group.next_block_step = group.decode_from
            self._opens_block[group.decode_from].append(group)
        else:
            self._schedule_next(group, position, group.decode_from)

    def _open_blocks(self, due: list[SequenceGroup], blocks: list[int], draft: PlanDraft) -> None:
        """Let groups write that are all at the beginning of a block."""
        full_at = draft.step + self._block_size
        for group in due:
            for sequence in group.sequences:
                block = blocks.pop()
                sequence.block_table.append(block)
                draft.grown_handles.append(sequence.handle)
                draft.grown_blocks.append(block)
            if group.search is not None:
                self.plan_beams(group, draft)
                continue
            group.next_block_step = full_at
            if full_at <= group.last_step:
                self._opens_block[full_at].append(group)

    def _use_blocks(
        self, group: SequenceGroup, position: int, blocks: list[int], draft: PlanDraft
    ) -> None:
        """Let a group write at this position, in the last of these blocks if it needs any."""
        self._tables.grow(group, position, blocks, draft)
        if group.search is None:
            self._schedule_next(group, position, draft.step)
        else:
            self.plan_beams(group, draft)

    def _schedule_next(self, group: SequenceGroup, position: int, step: int) -> None:
        """Enter a group into the calendar: ``step`` writes at ``position`` of its sequences."""
        due = step + self._block_size - position % self._block_size
        group.next_block_step = due
        if due <= group.last_step:
            self._opens_block[due].append(group)
