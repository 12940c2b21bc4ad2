"""The draft of a step plan."""

from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.sequences.sequence import NO_TOKENS, Sequence, SequenceGroup
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages.plans import Admission, BeamStep, PlannedPreemption, StepPlan, Tick
from shared.sampling import SamplingParams


@dataclass(slots=True)
class AdmissionDraft:
    """An Admission without the tokens and the block table themselves.

    Attributes:
        num_tokens: of prompt and output so far.
        num_computed: how many of these have keys and values in the blocks.
        num_blocks: length of the block table.
    """

    handle: int
    choice: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed: int
    num_blocks: int
    sampling: SamplingParams


class PlanDraft:
    """Lists that become the arrays of a StepPlan.

    Args:
        step: its number.
        budget: token budget of the step.

    Attributes:
        budget: what is left of the token budget.
        prompt_budget: what is left of it for prompts.
        first_prompt_budget: how much of that only the first prompt may take.
        dropped: groups that ended because the prefix that they computed was given up, with their
            only sequence.
    """

    __slots__ = (
        "_admitted",
        "admissions",
        "beams",
        "budget",
        "chunk_handles",
        "chunk_tokens",
        "copy_sources",
        "copy_targets",
        "dropped",
        "first_prompt_budget",
        "fork_children",
        "fork_choices",
        "fork_parents",
        "grown_blocks",
        "grown_handles",
        "preemptions",
        "prompt_budget",
        "replaced_columns",
        "replaced_handles",
        "retired",
        "step",
        "swap_in_device",
        "swap_in_host",
        "swap_out_device",
        "swap_out_host",
    )

    def __init__(self, step: int, budget: int = 0) -> None:
        # Every step makes one: a dataclass that calls a factory for each field takes three times
        # as long.
        self.step = step
        self.budget = budget
        self.prompt_budget = 0
        self.first_prompt_budget = 0
        self.retired: list[int] = []
        self.dropped: list[tuple[SequenceGroup, Sequence]] = []
        self.beams: list[BeamStep] = []
        self.swap_out_device: list[int] = []
        self.swap_out_host: list[int] = []
        self.swap_in_host: list[int] = []
        self.swap_in_device: list[int] = []
        self.copy_sources: list[int] = []
        self.copy_targets: list[int] = []
        self.replaced_handles: list[int] = []
        self.replaced_columns: list[int] = []
        self.admissions: list[AdmissionDraft] = []
        self._admitted: list[tuple[SequenceGroup, Sequence]] = []  # of ``admissions``
        self.fork_parents: list[int] = []
        self.fork_children: list[int] = []
        self.fork_choices: list[int] = []
        self.grown_handles: list[int] = []
        self.grown_blocks: list[int] = []
        self.chunk_handles: list[int] = []
        self.chunk_tokens: list[int] = []
        self.preemptions: list[PlannedPreemption] = []

    def admit(self, group: SequenceGroup) -> None:
        """Add all that the worker needs of the sequences of a group that it computes."""
        for sequence in group.prefilled:
            sequence.is_resident = True
            admission = AdmissionDraft(
                sequence.handle,
                sequence.choice,
                group.num_tokens,
                group.num_prompt_tokens,
                sequence.num_planned,
                len(sequence.block_table),
                group.submit.sampling,
            )
            self.admissions.append(admission)
            self._admitted.append((group, sequence))

    @property
    def is_empty(self) -> bool:
        """Whether the plan has nothing for the worker besides decoding."""
        return not (
            self.chunk_handles
            or self.swap_out_device  # also if no sequence is left: the blocks are free now
            or self.copy_sources
            or self.grown_handles
            or self.admissions
        )

    def swap_in(self, host: int, device: int) -> None:
        """Copy a host block to a device block."""
        self.swap_in_host.append(host)
        self.swap_in_device.append(device)

    def copy(self, handle: int, column: int, source: int, target: int) -> None:
        """Give a sequence its own copy of a shared block."""
        self.copy_sources.append(source)
        self.copy_targets.append(target)
        self.replaced_handles.append(handle)
        self.replaced_columns.append(column)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence sample from its parent's logits in this step."""
        child.is_resident = True
        self.fork_parents.append(parent.handle)
        self.fork_children.append(child.handle)
        self.fork_choices.append(child.choice)

    def search(self, group: SequenceGroup) -> None:
        """Let the beams of a group compute their last tokens, and return candidates.

        The beams continue ``group.parents``, or are all in chunks already.
        """
        assert group.search is not None, f"{group.request_id} has no beams"
        beams = group.search.running
        tokens = [beam.token for beam in beams] if group.parents else []
        self.beams.append(
            BeamStep(
                group.handle,
                _packed([sequence.handle for sequence in group.sequences]),
                np.array([beam.score for beam in beams], np.float32),
                _packed(group.parents),
                _packed(tokens),
            )
        )
        if group.parents:
            for sequence in group.sequences:
                sequence.is_resident = True
                self.chunk(sequence.handle, 1)

    def chunk(self, handle: int, num_tokens: int) -> None:
        """Compute the next ``num_tokens`` tokens of a sequence."""
        self.chunk_handles.append(handle)
        self.chunk_tokens.append(num_tokens)
        self.budget -= num_tokens

    def finish(
        self,
        now_ms: int,
        requests_cursor: EntryId,
        outputs_cursor: EntryId,
        outputs_min_id: EntryId,
        idle_ticks: list[Tick],
    ) -> StepPlan:
        """The plan, with the times and cursors of its end."""
        return StepPlan(
            step=self.step,
            now_ms=now_ms,
            requests_cursor=str(requests_cursor),
            outputs_cursor=str(outputs_cursor),
            outputs_min_id=str(outputs_min_id),
            retired=_packed(self.retired),
            beams=tuple(self.beams),
            swap_out_device=_packed(self.swap_out_device),
            swap_out_host=_packed(self.swap_out_host),
            swap_in_host=_packed(self.swap_in_host),
            swap_in_device=_packed(self.swap_in_device),
            copy_sources=_packed(self.copy_sources),
            copy_targets=_packed(self.copy_targets),
            replaced_handles=_packed(self.replaced_handles),
            replaced_columns=_packed(self.replaced_columns),
            admissions=tuple(self._packed_admissions()),
            grown_handles=_packed(self.grown_handles),
            grown_blocks=_packed(self.grown_blocks),
            fork_parents=_packed(self.fork_parents),
            fork_children=_packed(self.fork_children),
            fork_choices=_packed(self.fork_choices),
            chunk_handles=_packed(self.chunk_handles),
            chunk_tokens=_packed(self.chunk_tokens),
            idle_turns=tuple(idle_ticks),
            preemptions=tuple(self.preemptions),
        )

    def _packed_admissions(self) -> list[Admission]:
        """Admissions with tokens and block tables, which do not change while a plan is made."""
        packed: list[Admission] = []
        first: dict[int, Admission] = {}  # of a group with a grammar, by the group's identity
        for admission, (group, sequence) in zip(self.admissions, self._admitted, strict=True):
            sampling, before = admission.sampling, first.get(id(group))
            new = Admission(
                handle=admission.handle,
                choice=admission.choice,
                tokens=group.tokens_of(sequence),
                num_prompt_tokens=admission.num_prompt_tokens,
                num_computed=admission.num_computed,
                block_table=_packed(sequence.block_table),
                sampling=sampling if before is None else replace(sampling, grammar=""),
                grammar_of=0 if before is None else before.handle,
            )
            if sampling.grammar:
                first.setdefault(id(group), new)
            packed.append(new)
        return packed


def _packed(values: list[int]) -> IntArray:
    return np.array(values, np.int32) if values else NO_TOKENS  # most lists of most plans
