"""Beams among the resident sequences: how plans continue them, and which rows they compute.

A beam neither decodes nor samples by itself. The scheduler picks among the candidates of the whole
group, and its next plan names the beams that continue, and their tokens.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gpu_worker.batch.plan_checks import PlanRefused, check_beams
from gpu_worker.batch.rows import BeamRows, Rows
from gpu_worker.batch.sequence_arrays import SlotArrays, Slots
from shared.messages.plans import BeamStep


def continue_beams(steps: Sequence[BeamStep], batch: SlotArrays, slot_of: dict[int, int]) -> None:
    """Copy parents to new beams in all groups, then append each beam's token.

    Args:
        steps: of a plan.
        batch: the resident sequences.
        slot_of: slots by handle; the new beams are added.

    Raises:
        PlanRefused: a beam or a token is not valid.
    """
    check_beams(steps, batch.limits)
    handles = [handle for step in steps if len(step.parents) for handle in step.handles.tolist()]
    parents = [parent for step in steps for parent in step.parents.tolist()]
    if not parents:
        return
    sources = _slots_of(parents, batch, slot_of)
    _check_parents(sources, batch)
    targets = sources.copy()
    new = [index for index, handle in enumerate(handles) if handle != parents[index]]
    for index in new:
        if handles[index] in slot_of:
            raise PlanRefused(f"beam {handles[index]} cannot be new: it is here already")
        targets[index] = slot_of[handles[index]] = batch.take_slot()
    batch.copy_slots(sources[new], targets[new])
    batch.handle[targets] = handles
    batch.last_token[targets] = np.concatenate([step.tokens for step in steps])
    batch.num_tokens[targets] += 1


def beam_rows(
    steps: Sequence[BeamStep], rows: Rows, batch: SlotArrays, slot_of: Mapping[int, int]
) -> tuple[BeamRows, ...]:
    """The rows of each group.

    Raises:
        PlanRefused: a group has a beam that does not compute its last token in this step, or a
            beam that does has no group.
    """
    ends = rows.sizes.cumsum()[-len(rows.chunks) :].tolist() if rows.sizes is not None else []
    last_rows = {
        chunk.slot: end - 1
        for chunk, end in zip(rows.chunks, ends, strict=True)
        if chunk.is_beam and chunk.reaches_last
    }
    found = []
    for step in steps:
        slots = _slots_of(step.handles.tolist(), batch, slot_of)
        idle = [slot for slot in slots.tolist() if slot not in last_rows]
        if idle:
            beams = batch.handle[idle].tolist()
            raise PlanRefused(f"beams {beams} do not compute their last tokens in this step")
        width = int(batch.beam_width[slots].min())
        if width < len(slots):
            raise PlanRefused(f"beam group {step.group}: {len(slots)} beams, but {width} is wide")
        found.append(BeamRows(step, slots, np.array([last_rows.pop(s) for s in slots.tolist()])))
    if last_rows:
        beams = batch.handle[list(last_rows)].tolist()
        raise PlanRefused(f"beams {beams} compute their last tokens, but are in no group")
    return tuple(found)


def _slots_of(handles: Iterable[int], batch: SlotArrays, slot_of: Mapping[int, int]) -> Slots:
    """Slots [n] of beams."""
    slots = []
    for handle in handles:
        slot = slot_of.get(handle)
        if slot is None:
            raise PlanRefused(f"beam {handle} is unknown")
        slots.append(slot)
    found = np.array(slots, np.int64)
    others = batch.handle[found[batch.beam_width[found] == 0]]
    if len(others):
        raise PlanRefused(f"sequences {others.tolist()} are no beams")
    return found


def _check_parents(slots: Slots, batch: SlotArrays) -> None:
    """Check that the beams in these slots are computed, and below their length limits.

    Raises:
        PlanRefused: one is not.
    """
    late = batch.num_computed[slots] < batch.num_tokens[slots]
    if late.any():
        beams = batch.handle[slots[late]].tolist()
        raise PlanRefused(f"beams {beams} are continued before they are computed")
    full = batch.num_tokens[slots] + 1 >= batch.max_length[slots]
    if full.any():
        beams = batch.handle[slots[full]].tolist()
        raise PlanRefused(f"beams {beams} are continued, but the next token is their last")
