"""A worker without a model: executes plans strictly and checks all their guarantees.

For each slot of the pool it records the hash of the tokens that led to its content. So it detects
any block that is shared, overwritten, copied or found in the prefix cache wrongly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates, StepResult
from shared.messages.plans import Admission, BeamStep, StepPlan
from tests.support.fake_beams import candidates

DrawToken = Callable[[int, int], tuple[int, bool]]
"""(handle, position) -> the token sampled there, and whether it ends the sequence."""


@dataclass
class Resident:
    """The state of a resident sequence."""

    admission: Admission
    tokens: list[int]
    table: list[int]
    num_computed: int
    decoding: bool = False
    ended: bool = False
    contents: list[int] = field(default_factory=list)  # by position: hash of all tokens up to it

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.admission.num_prompt_tokens

    def content(self, position: int) -> int:
        """The expected content of the slot of this position."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else 0
            self.contents.append(hash((before, self.tokens[len(self.contents)])))
        return self.contents[position]


class FakeWorker:
    """Executes plans strictly in order.

    Args:
        block_size: tokens in a block.
        max_num_batched_tokens: no plan may have more tokens.
        draw: the model.
    """

    def __init__(self, block_size: int, max_num_batched_tokens: int, draw: DrawToken) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.draw = draw
        self.residents: dict[int, Resident] = {}
        self.step = 0
        self.pool: dict[int, int] = {}  # slot -> content written last
        self.host: dict[int, list[int | None]] = {}  # host block -> contents of its slots
        self.num_copies = 0
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step."""
        assert plan.step == self.step + 1, "steps are dense"
        self.step = plan.step
        self._apply(plan)
        chunks = dict(zip(plan.chunk_handles.tolist(), plan.chunk_tokens.tolist(), strict=True))
        for handle, resident in self.residents.items():
            if handle not in chunks and resident.decoding and not resident.ended:
                chunks[handle] = 1
        num_batched = sum(chunks.values())
        # There are no rows if everything planned has ended in a step that was still in flight.
        assert num_batched <= self.max_num_batched_tokens
        sampled = self._compute_all(chunks)
        sampled += self._fork(plan, sampled)
        for handle in chunks:
            self._check(self.residents[handle])
        beams = tuple(self._candidates(step, sampled) for step in plan.beams)
        return self._sample_all(plan, sampled, num_batched, beams)

    def _apply(self, plan: StepPlan) -> None:
        for handle in plan.retired.tolist():
            del self.residents[handle]
        self._branch(plan.beams)
        swaps_out = zip(plan.swap_out_device.tolist(), plan.swap_out_host.tolist(), strict=True)
        for device, host in swaps_out:
            self.host[host] = self._content_of(device)
        assert not set(plan.swap_in_device.tolist()) & set(plan.copy_sources.tolist())
        swaps_in = zip(plan.swap_in_host.tolist(), plan.swap_in_device.tolist(), strict=True)
        for host, device in swaps_in:
            self._put(device, self.host[host])
        assert not set(plan.copy_sources.tolist()) & set(plan.copy_targets.tolist())
        for source, target in zip(
            plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True
        ):
            self._copy(source, target)
        for handle, column, block in zip(
            plan.replaced_handles.tolist(),
            plan.replaced_columns.tolist(),
            plan.copy_targets.tolist(),
            strict=True,
        ):
            self.residents[handle].table[column] = block
        for admission in plan.admissions:
            assert admission.handle not in self.residents
            assert admission.num_computed < len(admission.tokens)
            self.residents[admission.handle] = Resident(
                admission,
                admission.tokens.tolist(),
                admission.block_table.tolist(),
                admission.num_computed,
            )
        for handle, block in zip(
            plan.grown_handles.tolist(), plan.grown_blocks.tolist(), strict=True
        ):
            self.residents[handle].table.append(block)

    def _branch(self, steps: tuple[BeamStep, ...]) -> None:
        for step in steps:
            pairs = zip(step.parents.tolist(), step.handles.tolist(), strict=False)
            for parent, handle in pairs:
                if handle != parent:
                    assert handle not in self.residents
                    old = self.residents[parent]
                    self.residents[handle] = Resident(
                        old.admission, list(old.tokens), list(old.table), old.num_computed
                    )
            if len(step.parents):
                for handle, token in zip(step.handles.tolist(), step.tokens.tolist(), strict=True):
                    self.residents[handle].tokens.append(token)

    def _candidates(self, step: BeamStep, sampled: list[int]) -> BeamCandidates:
        beams = []
        for handle in step.handles.tolist():
            sampled.remove(handle)
            beams.append(self.residents[handle])
        params = beams[0].admission.sampling.beams
        assert params is not None
        return candidates(
            step,
            [tuple(beam.tokens) for beam in beams],
            beams[0].admission.num_prompt_tokens,
            beams[0].admission.sampling.max_tokens,
            params.width,
        )

    def _copy(self, source: int, target: int) -> None:
        self.num_copies += 1
        self._put(target, self._content_of(source))

    def _content_of(self, block: int) -> list[int | None]:
        first = block * self.block_size
        return [self.pool.get(slot) for slot in range(first, first + self.block_size)]

    def _put(self, block: int, content: list[int | None]) -> None:
        for offset, found in enumerate(content):
            if found is not None:
                self.pool[block * self.block_size + offset] = found

    def _compute_all(self, chunks: dict[int, int]) -> list[int]:
        """Write the K/V of the step; the handles that sample."""
        sampled = []
        for handle, count in chunks.items():
            resident = self.residents[handle]
            if resident.ended:
                continue
            assert 1 <= count <= len(resident.tokens) - resident.num_computed
            for position in range(resident.num_computed, resident.num_computed + count):
                self.pool[self._slot(resident, position)] = resident.content(position)
            resident.num_computed += count
            self.num_computed += count
            if resident.num_computed == len(resident.tokens):
                sampled.append(handle)
        return sampled

    def _fork(self, plan: StepPlan, sampled: list[int]) -> list[int]:
        for parent, child, choice in zip(
            plan.fork_parents.tolist(),
            plan.fork_children.tolist(),
            plan.fork_choices.tolist(),
            strict=True,
        ):
            assert parent in sampled, "a fork samples with its parent"
            assert child not in self.residents
            assert choice != self.residents[parent].admission.choice
            old = self.residents[parent]
            self.residents[child] = Resident(
                old.admission, list(old.tokens), list(old.table), old.num_computed
            )
        return plan.fork_children.tolist()

    def _check(self, resident: Resident) -> None:
        """Check that everything computed of a sequence is still there."""
        if not resident.ended:
            for position in range(resident.num_computed):
                assert self.pool[self._slot(resident, position)] == resident.content(position)

    def _slot(self, resident: Resident, position: int) -> int:
        block = resident.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _sample_all(
        self,
        plan: StepPlan,
        sampled: list[int],
        num_batched: int,
        beams: tuple[BeamCandidates, ...],
    ) -> StepResult:
        tokens, ended_rows, flags = [], [], []
        for row, handle in enumerate(sampled):
            token, flag = self._sample(handle, self.residents[handle])
            tokens.append(token)
            if flag is not None:
                ended_rows.append(row)
                flags.append(flag)
        admitted = [(new.handle, new.num_computed) for new in plan.admissions]
        return StepResult(
            step=plan.step,
            handles=np.array(sampled, np.int32),
            tokens=np.array(tokens, np.int32),
            ended_rows=np.array(ended_rows, np.int32),
            ended_flags=np.array(flags, np.int32),
            beams=beams,
            logprobs=(),
            prompt_logprobs=(),
            admitted_handles=np.array([handle for handle, _ in admitted], np.int32),
            admitted_computed=np.array([count for _, count in admitted], np.int32),
            num_batched_tokens=num_batched,
            model_us=0,
            step_us=0,
        )

    def _sample(self, handle: int, resident: Resident) -> tuple[int, EndFlag | None]:
        assert resident.admission.sampling.beams is None, "beams do not sample"
        token, stop = self.draw(handle, len(resident.tokens))
        resident.tokens.append(token)
        resident.decoding = True
        flag = None
        if stop:
            flag = EndFlag.STOP
        elif resident.num_generated == resident.admission.sampling.max_tokens:
            flag = EndFlag.LENGTH
        resident.ended = flag is not None
        return token, flag
