"""Checks of plans that need only the limits of model and pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.codec import IntArray
from shared.errors import PageStreamError
from shared.messages.leases import KVGeometry
from shared.messages.plans import Admission, BeamStep, StepPlan


class PlanRefused(PageStreamError):
    """A plan does not fit the resident sequences."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of sequences, from the model and the pool."""

    kv: KVGeometry
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence as long as the context."""
        return -(-self.max_model_len // self.kv.block_size)


def check_admission(new: Admission, limits: Limits) -> None:
    """Check an admitted sequence against the limits.

    Raises:
        PlanRefused: it exceeds one.
    """
    where = f"admission of {new.handle}"
    if not 0 <= new.num_computed < len(new.tokens):
        raise PlanRefused(f"{where}: {new.num_computed} of {len(new.tokens)} tokens computed")
    if len(new.tokens) >= limits.max_model_len:
        raise PlanRefused(f"{where}: {len(new.tokens)} tokens leave no room in the context")
    if new.tokens.min() < 0 or new.tokens.max() >= limits.vocab_size:
        raise PlanRefused(f"{where}: a token is outside the vocabulary")
    if len(new.block_table) > limits.max_blocks:
        raise PlanRefused(f"{where}: {len(new.block_table)} blocks are more than it can fill")
    if new.num_computed > len(new.block_table) * limits.kv.block_size:
        raise PlanRefused(f"{where}: {new.num_computed} computed tokens do not fit its blocks")
    for block in (new.block_table.min(initial=0), new.block_table.max(initial=0)):
        check_block(int(block), limits)


def check_block(block: int, limits: Limits) -> None:
    """Check that the pool has a block.

    Raises:
        PlanRefused: it does not.
    """
    if not 0 <= block < limits.kv.num_blocks:
        raise PlanRefused(f"there is no block {block}")


def check_beams(steps: Sequence[BeamStep], limits: Limits) -> None:
    """Check that the arrays of each group fit each other, and that no beam is named twice.

    Raises:
        PlanRefused: they do not, or one is.
    """
    for step in steps:
        _check_beam_step(step, limits)
    groups = [step.group for step in steps]
    handles = np.concatenate([step.handles for step in steps])
    if len(set(groups)) < len(groups) or len(np.unique(handles)) < len(handles):
        raise PlanRefused(f"beam groups {groups} name a group or a beam twice: {handles.tolist()}")


def _check_beam_step(step: BeamStep, limits: Limits) -> None:
    where = f"beam group {step.group}"
    width = len(step.handles)
    sizes = (len(step.scores), len(step.parents), len(step.tokens))
    if not width or sizes not in ((width, width, width), (width, 0, 0)):
        raise PlanRefused(f"{where}: {width} beams with {sizes} scores, parents and tokens")
    if not np.isfinite(step.scores).all():
        raise PlanRefused(f"{where}: scores {step.scores.tolist()} are no log-probabilities")
    if step.tokens.min(initial=0) < 0 or step.tokens.max(initial=0) >= limits.vocab_size:
        raise PlanRefused(f"{where}: a token of {step.tokens.tolist()} is outside the vocabulary")


def check_swaps(plan: StepPlan, limits: Limits) -> None:
    """Check that swaps name blocks of both pools, and no target twice.

    Raises:
        PlanRefused: a block does not exist, or is a target twice.
    """
    _check_swap(plan.swap_out_device, plan.swap_out_host, plan.swap_out_host, limits)
    _check_swap(plan.swap_in_device, plan.swap_in_host, plan.swap_in_device, limits)


def _check_swap(device: IntArray, host: IntArray, targets: IntArray, limits: Limits) -> None:
    if len(device) != len(host):
        raise PlanRefused(f"{len(device)} and {len(host)} blocks are swapped with each other")
    if not len(device):
        return
    for block in (device.min(), device.max()):
        check_block(int(block), limits)
    for block in (host.min(), host.max()):
        if not 0 <= block < limits.kv.num_host_blocks:
            raise PlanRefused(f"there is no host block {block}")
    if len(np.unique(targets)) < len(targets):
        raise PlanRefused("a block is swapped to twice")


def check_copies(plan: StepPlan, limits: Limits) -> None:
    """Check that copied blocks exist, and that the order of the copies does not matter.

    Raises:
        PlanRefused: a block does not exist, is a target twice, or is both source and target.
    """
    sources, targets = plan.copy_sources, plan.copy_targets
    if not len(sources) and not len(targets):
        return
    for blocks in (sources, targets):
        for block in (blocks.min(initial=0), blocks.max(initial=0)):
            check_block(int(block), limits)
    if len(np.unique(targets)) < len(targets) or len(np.intersect1d(sources, targets)):
        raise PlanRefused("a block is copied to twice, or copied from and to")
