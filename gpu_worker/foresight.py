"""What a plan that is not carried out yet will ask of KV memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.admissible import PlanRefused, check_admission, check_block
from gpu_worker.batch import BatchState
from gpu_worker.rows import Indices
from shared.messages import StepPlan


@dataclass(frozen=True, slots=True)
class Expected:
    """Where sequences will be, and with which blocks."""

    slots: Indices  # [S]
    tables: npt.NDArray[np.int32]  # [S, C]; entries past a sequence's blocks are garbage
    num_blocks: Indices  # [S]


def expect(plan: StepPlan, batch: BatchState) -> Expected | None:
    """What the next plan leads to, from the sequences as they are; ``batch`` is not changed.

    Only what can be said with little: None where beams go on, which change places, and where
    the plan does not fit, which is said when it is carried out.
    """
    if plan.beams:
        return None
    try:
        return _expect(plan, batch)
    except PlanRefused:
        return None


def _expect(plan: StepPlan, batch: BatchState) -> Expected:
    limits = batch.limits
    freed = [_slot(batch, handle) for handle in plan.retired.tolist()]
    present = batch.taken.copy()
    present[freed] = False
    tables = batch.block_tables.copy()
    num_blocks = batch.num_slots // limits.kv.block_size
    replaced = zip(
        plan.replaced_handles.tolist(),
        plan.replaced_columns.tolist(),
        plan.copy_targets.tolist(),
        strict=False,
    )
    for handle, column, target in replaced:
        check_block(target, limits)
        if 0 <= column < tables.shape[1]:
            tables[_slot(batch, handle), column] = target
    for handle, block in zip(plan.grown_handles.tolist(), plan.grown_blocks.tolist(), strict=False):
        check_block(block, limits)
        slot = _slot(batch, handle)
        column = int(num_blocks[slot])
        if column < tables.shape[1] and not batch.ended[slot]:
            tables[slot, column] = block
            num_blocks[slot] += 1
    free = batch.next_slots(freed)
    for new in plan.admissions:
        check_admission(new, limits)
        if not free:
            break  # there will be more slots, and more ranges
        slot = free.pop()
        present[slot] = True
        num_blocks[slot] = len(new.block_table)
        tables[slot, : len(new.block_table)] = new.block_table
    slots = np.flatnonzero(present)
    width = int(num_blocks[slots].max(initial=0))
    return Expected(slots, tables[slots, :width], num_blocks[slots])


def _slot(batch: BatchState, handle: int) -> int:
    slot = batch.slot_of(handle)
    if slot is None:
        raise PlanRefused(f"sequence {handle} is unknown")
    return slot
