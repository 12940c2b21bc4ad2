"""Counts the blocks in block tables, plan by plan, at a cost that does not grow with running ones.

The scheduler core has the same numbers, but only by a pass over every running sequence. Of decoding
sequences only the step number changes, so sums are kept of everything else. Beam searches,
whose tables change with each result, are not supported.
"""

from collections import defaultdict
from dataclasses import dataclass

from scheduler_svc.core.step.plan_draft import AdmissionDraft, PlanDraft


@dataclass(slots=True)
class _Table:
    """The block table of one sequence.

    Attributes:
        num_tokens: with keys and values; while it decodes, minus the step number.
        num_known: tokens that it had when it was admitted.
        final: tokens with keys and values when its request is complete.
        last_step: that adds a token.
        has_own_end: no other sequence references its last block.
    """

    num_blocks: int
    num_tokens: int
    num_known: int
    final: int
    last_step: int = 0
    is_decoding: bool = False
    has_own_end: bool = True


class Occupancy:
    """Sums over all block tables, as of the last plan.

    Args:
        block_size: tokens.

    Attributes:
        num_references: blocks of all tables; shared blocks count once for each table.
        num_slots: of the blocks of all tables whose last block is not shared.
        num_useful: of those slots, the ones that will hold a token.
    """

    def __init__(self, block_size: int) -> None:
        self.num_references = 0
        self.num_slots = 0
        self.num_useful = 0
        self._block_size = block_size
        self._step = 0
        self._tables: dict[int, _Table] = {}  # by handle
        self._num_tokens = 0
        self._num_decoding = 0
        self._ending: defaultdict[int, list[int]] = defaultdict(list)  # handles, by last step
        self._forked: list[int] = []  # handles whose last block is shared until the next plan

    @property
    def num_tokens(self) -> int:
        """Tokens with keys and values, of all tables whose last block is not shared."""
        return self._num_tokens + self._num_decoding * self._step

    def plan(self, draft: PlanDraft) -> None:
        """Update the sums by the next plan."""
        step = draft.step
        if step - 1 in self._ending:
            self._stop_growing(step - 1)
        if self._forked:
            self._part()
        self._step = step
        if draft.grown_handles:
            self._grow(draft.grown_handles)  # some of them may be preempted for others
        for handle in draft.retired:
            self._remove(handle)
        for admission in draft.admissions:
            self._admit(admission)
        if draft.chunk_handles:
            self._compute(draft)

    def _grow(self, handles: list[int]) -> None:
        """Add a block to each; decoding sequences get no block that they will not use."""
        tables, block_size = self._tables, self._block_size
        for handle in handles:
            table = tables[handle]
            left = table.final - table.num_blocks * block_size
            self.num_useful += left if left < block_size else block_size
            table.num_blocks += 1
        self.num_references += len(handles)
        self.num_slots += len(handles) * block_size

    def _admit(self, admission: AdmissionDraft) -> None:
        table = self._tables[admission.handle] = _Table(
            admission.num_blocks,
            admission.num_computed,
            admission.num_tokens,
            admission.num_prompt_tokens + admission.sampling.max_tokens - 1,
        )
        self.num_references += table.num_blocks
        self._count(table, 1)

    def _remove(self, handle: int) -> None:
        table = self._tables.pop(handle, None)
        if table is not None:
            self.num_references -= table.num_blocks
            if table.has_own_end:
                self._count(table, -1)

    def _count(self, table: _Table, sign: int) -> None:
        slots = table.num_blocks * self._block_size
        self.num_slots += sign * slots
        self.num_useful += sign * min(slots, table.final)
        self._num_tokens += sign * table.num_tokens
        if table.is_decoding:
            self._num_decoding += sign

    def _compute(self, draft: PlanDraft) -> None:
        """Compute chunks of prompts; sequences that are done with them decode from then on."""
        for handle, count in zip(draft.chunk_handles, draft.chunk_tokens, strict=True):
            table = self._tables[handle]
            table.num_tokens += count
            self._num_tokens += count
            if table.num_tokens == table.num_known:
                self._start_decoding(handle, table, draft)

    def _start_decoding(self, handle: int, table: _Table, draft: PlanDraft) -> None:
        step = draft.step
        table.last_step = step + table.final - table.num_known
        if table.last_step > step:
            table.is_decoding = True
            table.num_tokens -= step
            self._num_tokens -= step
            self._num_decoding += 1
            self._ending[table.last_step].append(handle)
        for parent, child in zip(draft.fork_parents, draft.fork_children, strict=True):
            if parent == handle:
                self._fork(table, child)

    def _fork(self, parent: _Table, child: int) -> None:
        """Fork a choice that samples from its parent's logits; it writes from the next plan on."""
        self._tables[child] = _Table(
            parent.num_blocks,
            parent.num_tokens,
            parent.num_known,
            parent.final,
            parent.last_step,
            parent.is_decoding,
            has_own_end=False,
        )
        self.num_references += parent.num_blocks
        if parent.is_decoding:
            self._forked.append(child)
            self._ending[parent.last_step].append(child)

    def _part(self) -> None:
        """Give forked sequences, which write now, last blocks of their own."""
        for handle in self._forked:
            table = self._tables[handle]
            table.has_own_end = True
            self._count(table, 1)
        self._forked = []

    def _stop_growing(self, step: int) -> None:
        """Handle sequences whose last tokens are in the plans up to ``step``."""
        for handle in self._ending.pop(step):
            table = self._tables.get(handle)
            if table is not None and table.is_decoding and table.last_step == step:
                table.is_decoding = False
                table.num_tokens += step
                self._num_decoding -= 1
                self._num_tokens += step
