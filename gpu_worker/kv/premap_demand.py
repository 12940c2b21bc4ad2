"""Computes which blocks the next plan will need mapped, without carrying it out."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.batch import BatchState
from gpu_worker.batch.plan_checks import PlanRefused, check_admission, check_block
from gpu_worker.batch.rows import Indices
from shared.messages.plans import StepPlan


@dataclass(frozen=True, slots=True)
class PremapDemand:
    """The sequences whose blocks change, and their new block tables."""

    slots: Indices  # [S] batch slots
    tables: npt.NDArray[np.int32]  # [S, C]; entries past a sequence's blocks are garbage
    num_blocks: Indices  # [S]


def premap_demand(plan: StepPlan, batch: BatchState) -> PremapDemand | None:
    """The block tables after the next plan, computed from the present batch, which stays as it is.

    None if no sequence's blocks change; if beams go on, because they change slots; and if the plan
    does not fit the batch, which carrying it out will report.
    """
    if plan.beams:
        return None
    try:
        return _demand(plan, batch)
    except PlanRefused:
        return None


def _demand(plan: StepPlan, batch: BatchState) -> PremapDemand | None:
    limits = batch.limits
    freed = [_slot(batch, handle) for handle in plan.retired.tolist()]
    changes: dict[int, _Table] = {}
    replaced = zip(
        plan.replaced_handles.tolist(),
        plan.replaced_columns.tolist(),
        plan.copy_targets.tolist(),
        strict=False,
    )
    for handle, column, target in replaced:
        check_block(target, limits)
        table = _table(changes, batch, _slot(batch, handle))
        if 0 <= column < len(table.blocks):
            table.blocks[column] = target
    for handle, block in zip(plan.grown_handles.tolist(), plan.grown_blocks.tolist(), strict=False):
        check_block(block, limits)
        slot = _slot(batch, handle)
        table = _table(changes, batch, slot)
        if table.num_blocks < len(table.blocks) and not batch.ended[slot]:
            table.blocks[table.num_blocks] = block
            table.num_blocks += 1
    for slot in freed:
        changes.pop(slot, None)
    free = batch.next_slots(freed)
    for new in plan.admissions:
        check_admission(new, limits)
        if not free:
            break  # the batch will grow, and so will the ranges
        blocks = np.zeros(batch.block_tables.shape[1], np.int32)
        blocks[: len(new.block_table)] = new.block_table
        changes[free.pop()] = _Table(blocks, len(new.block_table))
    if not changes:
        return None
    width = max(table.num_blocks for table in changes.values())
    return PremapDemand(
        np.array(list(changes), np.int64),
        np.stack([table.blocks[:width] for table in changes.values()]),
        np.array([table.num_blocks for table in changes.values()], np.int64),
    )


@dataclass(slots=True)
class _Table:
    """One sequence's blocks."""

    blocks: npt.NDArray[np.int32]  # [C]
    num_blocks: int


def _table(changes: dict[int, _Table], batch: BatchState, slot: int) -> _Table:
    """The table of a sequence, which is added to those that change."""
    if slot not in changes:
        num_blocks = int(batch.block_capacity[slot]) // batch.limits.kv.block_size
        changes[slot] = _Table(batch.block_tables[slot].copy(), num_blocks)
    return changes[slot]


def _slot(batch: BatchState, handle: int) -> int:
    slot = batch.slot_of(handle)
    if slot is None:
        raise PlanRefused(f"sequence {handle} is unknown")
    return slot
