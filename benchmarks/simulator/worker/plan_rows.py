"""The worker's side of plans, without a model: the rows that compute, and when they end.

Time per step is proportional to what a plan changes, as in the scheduler core. Rows that only
decode are kept in arrays without a pass over them, their contexts as one sum that grows by their
number, and a calendar holds the step in which each row reaches its length.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.beam_samples import BeamDraws
from scheduler_svc.core.step.plan_draft import AdmissionDraft, PlanDraft
from shared.codec import IntArray
from shared.messages.outputs import BeamCandidates
from shared.messages.plans import BeamStep


@dataclass(slots=True)
class _Prefill:
    """A sequence with tokens still to be computed."""

    admission: AdmissionDraft
    num_computed: int


@dataclass(slots=True)
class _Search:
    """A beam search."""

    num_prompt_tokens: int
    num_generated: int
    max_tokens: int
    width: int


class Rows:
    """Executes plans in order, each in two halves: its work, and its results.

    Args:
        max_num_sequences: resident at once.
        block_bytes: keys and values of a block.
        copies_per_block: transfers for swapping one.
        draws: for beams.

    Attributes:
        ended: handles that sampled their last token in the step that ended last.
        candidates: of the beam searches in it.
    """

    def __init__(
        self, max_num_sequences: int, block_bytes: int, copies_per_block: int, draws: BeamDraws
    ) -> None:
        self.ended: list[int] = []
        self.candidates: tuple[BeamCandidates, ...] = ()
        self._block_bytes = block_bytes
        self._copies_per_block = copies_per_block
        self._draws = draws
        self._prefills: dict[int, _Prefill] = {}
        self._searches: dict[int, _Search] = {}
        self._num_beams = 0  # that compute in this step
        # Rows that sample: [:_num_rows] of the arrays, in any order.
        self._num_rows = 0
        self._handles = np.zeros(max_num_sequences, np.int32)
        self._tokens = np.zeros(max_num_sequences, np.int32)
        # Views of the rows in use, kept until their number changes.
        self._sampled = (self._handles[:0], self._tokens[:0])
        self._bases = [0] * max_num_sequences  # a row attends to base + step tokens
        self._ends = [0] * max_num_sequences  # step that gives its last token
        self._row_of: dict[int, int] = {}  # by handle
        self._sum_of_bases = 0
        self._ending: defaultdict[int, list[int]] = defaultdict(list)  # handles, by step

    def begin(self, plan: PlanDraft) -> Work:
        """Take the next plan; its work."""
        step = plan.step
        if self.ended:
            for handle in self.ended:
                self._remove(handle)
            self.ended = []
        for handle in plan.retired:
            if handle in self._row_of:
                self._remove(handle)
            else:
                self._prefills.pop(handle, None)
        for admission in plan.admissions:
            self._prefills[admission.handle] = _Prefill(admission, admission.num_computed)
        num_decoding = self._num_rows
        decode_context = self._sum_of_bases + num_decoding * step
        num_prefilled = prefill_context = 0
        if plan.chunk_handles:
            for handle, count in zip(plan.chunk_handles, plan.chunk_tokens, strict=True):
                prefill = self._prefills.get(handle)
                if prefill is None:
                    continue  # a beam that goes on
                begin = prefill.num_computed
                prefill.num_computed = begin + count
                if count == 1:
                    num_decoding += 1
                    decode_context += begin + 1
                else:
                    num_prefilled += count
                    prefill_context += count * begin + count * (count + 1) // 2
                if prefill.num_computed == prefill.admission.num_tokens:
                    self._computed(prefill, step, plan)
        self._num_beams = 0
        self.candidates = ()
        if plan.beams:
            num_going_on, context = self._search(plan.beams)
            num_decoding += num_going_on
            decode_context += context
        num_sampled = self._num_rows + self._num_beams
        work = Work(num_prefilled, prefill_context, num_decoding, decode_context, num_sampled)
        if plan.swap_out_device or plan.swap_in_device or plan.copy_sources:
            num_swapped = len(plan.swap_out_device) + len(plan.swap_in_device)
            work.swapped_bytes = num_swapped * self._block_bytes
            work.copied_bytes = len(plan.copy_sources) * self._block_bytes
            work.swap_copies = num_swapped * self._copies_per_block
        return work

    def end(self, step: int) -> tuple[IntArray, IntArray]:
        """Handles that the last plan samples for, and a token for each of them.

        The arrays are valid until the next plan.
        """
        num_rows = self._num_rows
        ending = self._ending.pop(step, None)
        if ending is not None:
            self.ended = [handle for handle in ending if self._ends_in(handle, step)]
        if len(self._sampled[0]) != num_rows:
            self._sampled = self._handles[:num_rows], self._tokens[:num_rows]
        return self._sampled

    @property
    def num_sampled(self) -> int:
        """Tokens that the last plan's step gives."""
        return self._num_rows + self._num_beams

    # -------------------------------------------------------------------- rows

    def _computed(self, prefill: _Prefill, step: int, plan: PlanDraft) -> None:
        """Handle a sequence whose known tokens are all computed; its forks start too."""
        admission = prefill.admission
        if admission.sampling.beams is not None:
            return  # its search continues it
        del self._prefills[admission.handle]
        num_generated = admission.num_tokens - admission.num_prompt_tokens
        last_step = step + admission.sampling.max_tokens - num_generated - 1
        base = admission.num_tokens - step
        self._add(admission.handle, admission.choice, base, last_step)
        forks = zip(plan.fork_parents, plan.fork_children, plan.fork_choices, strict=True)
        for parent, child, choice in forks:
            if parent == admission.handle:
                self._add(child, choice, base, last_step)

    def _add(self, handle: int, choice: int, base: int, last_step: int) -> None:
        row = self._num_rows
        self._num_rows += 1
        self._handles[row] = handle
        self._tokens[row] = choice  # so that choices of a request differ, as sampled ones do
        self._bases[row] = base
        self._ends[row] = last_step
        self._row_of[handle] = row
        self._sum_of_bases += base
        self._ending[last_step].append(handle)

    def _remove(self, handle: int) -> None:
        """Remove a row; the last row takes its place."""
        row = self._row_of.pop(handle)
        self._sum_of_bases -= self._bases[row]
        self._num_rows -= 1
        last = self._num_rows
        if row != last:
            moved = int(self._handles[last])
            self._handles[row] = moved
            self._tokens[row] = self._tokens[last]
            self._bases[row] = self._bases[last]
            self._ends[row] = self._ends[last]
            self._row_of[moved] = row

    def _ends_in(self, handle: int, step: int) -> bool:
        """Handles that end in a step; the calendar may still name preempted ones."""
        row = self._row_of.get(handle)
        return row is not None and self._ends[row] == step

    # ------------------------------------------------------------------- beams

    def _search(self, steps: list[BeamStep]) -> tuple[int, int]:
        """Draw continuations of all beams; the number of decoding beams, and their contexts."""
        num_going_on = context = 0
        searches = []
        for step in steps:
            search = self._searches.get(step.group)
            if search is None:
                search = self._searches[step.group] = self._new_search(int(step.handles[0]))
            num_beams = len(step.handles)
            self._num_beams += num_beams
            if len(step.parents):
                num_going_on += num_beams
                context += num_beams * (search.num_prompt_tokens + search.num_generated)
            else:
                for handle in step.handles.tolist():
                    self._prefills.pop(handle, None)
            search.num_generated += 1
            searches.append(search)
        are_last = [search.num_generated == search.max_tokens for search in searches]
        widths = [search.width for search in searches]
        self.candidates = self._draws.candidates(steps, widths, are_last)
        for step, is_last in zip(steps, are_last, strict=True):
            if is_last:
                del self._searches[step.group]
        return num_going_on, context

    def _new_search(self, handle: int) -> _Search:
        admission = self._prefills[handle].admission
        beams = admission.sampling.beams
        assert beams is not None, f"{handle} is not a beam"
        return _Search(admission.num_prompt_tokens, 0, admission.sampling.max_tokens, beams.width)
