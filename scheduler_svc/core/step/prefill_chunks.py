"""Chunked prefill: plans the tokens of a group that are not computed yet."""

from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.plan_draft import PlanDraft


def plan_chunks(group: SequenceGroup, draft: PlanDraft, tables: BlockTables) -> bool:
    """Plan as many of a group's next tokens as the budget allows; whether these were the last.

    Several sequences that are recomputed plan their last tokens in the same step, so that they stay
    equally long. Where only the first of several is computed, the others fork from it at the end.
    """
    wait_for_each_other = len(group.prefilled) > 1
    target = group.num_tokens - wait_for_each_other
    has_chunk = False
    for sequence in group.prefilled:
        num_tokens = min(target - sequence.num_planned, draft.prompt_budget)
        if num_tokens > 0:
            _plan_chunk(sequence, num_tokens, draft, tables)
            has_chunk = True
        if sequence.num_planned < target:
            return False
    if wait_for_each_other:
        if has_chunk or draft.budget < len(group.prefilled):
            return False
        for sequence in group.prefilled:
            _plan_chunk(sequence, 1, draft, tables)
    parent = group.sequences[0]
    for child in group.sequences[len(group.prefilled) :]:
        tables.fork(parent, child)
        draft.fork(parent, child)
    return True


def _plan_chunk(sequence: Sequence, num_tokens: int, draft: PlanDraft, tables: BlockTables) -> None:
    draft.chunk(sequence.handle, num_tokens)
    draft.prompt_budget -= num_tokens
    before = sequence.num_planned
    sequence.num_planned += num_tokens
    tables.register_planned(sequence, before)
