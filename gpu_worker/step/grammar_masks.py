"""The masks of one step, computed while the device computes its logits."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import Indices, Rows
from gpu_worker.batch.sequence_arrays import SlotArrays
from gpu_worker.grammar.grammars import Grammars, Masks
from gpu_worker.sampling import kernels
from gpu_worker.step.begun_step import BegunStep

_BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of the rows that follow a grammar.

    Attributes:
        sampled: [n] such rows among those that sample.
        beams: [m] such rows among those of all beams.
        future: masks [n + m, V / 32], in this order.
        grammars: whose they are.
    """

    sampled: Indices
    beams: Indices
    future: Future[Masks]
    grammars: Grammars

    def ban(
        self,
        logits: torch.Tensor,  # [R, V] of the rows that sample, changed in place
    ) -> None:
        """Set logits of tokens that are not allowed to -inf."""
        if not len(self.sampled):
            return
        masks = self.future.result()[: len(self.sampled)]
        if logits.is_cuda:
            ban_rows(logits, self.sampled, self.grammars.unpack(masks))
        else:
            kernels.on_cpu().ban(logits, self.sampled, masks)

    def allowed_of_beams(self, num_beams: int) -> torch.Tensor | None:
        """Whether each beam may continue with each token, [B, V]; None: all may with all."""
        if not len(self.beams):
            return None
        allowed = self.grammars.unpack(self.future.result()[len(self.sampled) :])
        if len(self.beams) == num_beams:
            return allowed
        found = torch.ones((num_beams, allowed.shape[1]), dtype=torch.bool, device=allowed.device)
        found[torch.from_numpy(self.beams).to(found.device, non_blocking=True)] = allowed
        return found


def ban_rows(
    logits: torch.Tensor,  # [R, V], changed in place
    rows: Indices,  # [n]
    allowed: torch.Tensor,  # [n, V] bool
) -> None:
    """Set logits of rows to -inf where a token is not allowed, without waiting for the device."""
    at = torch.from_numpy(rows).to(logits.device, non_blocking=True)
    logits[at] = logits[at].masked_fill_(~allowed, _BANNED)


def begin_masks(
    grammars: Grammars, batch: SlotArrays, rows: Rows, under_way: Iterable[BegunStep]
) -> StepMasks | None:
    """Begin to compute the masks of a step on another thread; None: no row follows a grammar.

    Args:
        grammars: that have followed the step's plan.
        batch: the resident sequences.
        rows: of the step.
        under_way: steps before it, whose tokens grammars may not have yet.
    """
    if not len(grammars):
        return None
    sampled = np.flatnonzero(batch.has_grammar[rows.sampled])
    beam_slots = np.concatenate([np.empty(0, np.int64), *(group.slots for group in rows.beams)])
    beams = np.flatnonzero(batch.has_grammar[beam_slots])
    if not len(sampled) and not len(beams):
        return None
    slots = np.concatenate([rows.sampled[sampled], beam_slots[beams]])
    handles = batch.handle[slots]
    before = list(under_way)

    def masks() -> Masks:
        for step in before:  # it computes as long as the step whose masks these are waits for it
            step.wait()
            take_tokens(grammars, step)
        found = grammars.masks(handles)
        # A beam that has failed goes no further; others of its group may.
        of_beams = slice(len(sampled), None)
        found[of_beams][grammars.failed(handles[of_beams])] = 0
        return found

    return StepMasks(sampled, beams, grammars.thread.submit(masks), grammars)


def failed_rows(grammars: Grammars, step: BegunStep) -> npt.NDArray[np.int64] | None:
    """Rows of a step that is done whose texts cannot follow their grammars; None: none follows one.

    Args:
        grammars: that have taken the step's tokens.
    """
    rows = step.grammar_rows
    return None if rows is None else rows[grammars.failed(step.advanced.handles[rows])]


def take_tokens(grammars: Grammars, step: BegunStep) -> None:
    """Let grammars take the tokens of a step that is done, unless they have them."""
    rows = step.grammar_rows
    if rows is not None and not step.taken:
        step.taken = True
        tokens, _ = step.outcome.tokens()
        grammars.take(step.advanced.handles[rows], tokens[rows])
