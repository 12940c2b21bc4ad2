"""A worker without a model: executes plans to the letter and checks every promise they make.

It knows each block's content as (sequence, position), so that a block handed out twice, a table
that is too short, or a token computed twice is seen at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.messages import Admission, EndFlag, StepPlan, StepResult

DrawToken = Callable[[int, int], tuple[int, bool]]
"""(handle, position) -> the token drawn there, and whether it ends the sequence."""


@dataclass
class Resident:
    """What a worker keeps of a sequence."""

    admission: Admission
    tokens: list[int]
    table: list[int]
    num_computed: int
    decoding: bool = False
    ended: bool = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.admission.num_prompt_tokens


class FakeWorker:
    """Executes plans strictly in order.

    Args:
        block_size: tokens in a block.
        max_num_batched_tokens: no plan may ask for more.
        draw: the model.
    """

    def __init__(self, block_size: int, max_num_batched_tokens: int, draw: DrawToken) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.draw = draw
        self.residents: dict[int, Resident] = {}
        self.step = 0
        self.pool: dict[int, tuple[int, int]] = {}  # slot -> (handle, position) written last

    def execute(self, plan: StepPlan) -> StepResult:
        """One step."""
        assert plan.step == self.step + 1, "steps are dense"
        self.step = plan.step
        self._apply(plan)
        chunks = dict(zip(plan.chunk_handles.tolist(), plan.chunk_tokens.tolist(), strict=True))
        for handle, resident in self.residents.items():
            if handle not in chunks and resident.decoding and not resident.ended:
                chunks[handle] = 1
        num_batched = sum(chunks.values())
        # None at all if everything planned has ended in a step that was still in flight.
        assert num_batched <= self.max_num_batched_tokens
        handles, tokens, ended_rows, flags = [], [], [], []
        for handle, count in chunks.items():
            resident = self.residents[handle]
            if resident.ended:
                continue
            self._compute(handle, resident, count)
            if resident.num_computed < len(resident.tokens):
                continue
            token, flag = self._sample(handle, resident)
            handles.append(handle)
            tokens.append(token)
            if flag is not None:
                ended_rows.append(len(handles) - 1)
                flags.append(flag)
        return StepResult(
            step=plan.step,
            handles=np.array(handles, np.int32),
            tokens=np.array(tokens, np.int32),
            ended_rows=np.array(ended_rows, np.int32),
            ended_flags=np.array(flags, np.int32),
            logprobs=(),
            prompt_logprobs=(),
            num_batched_tokens=num_batched,
            model_us=0,
            step_us=0,
        )

    def _apply(self, plan: StepPlan) -> None:
        for handle in plan.retired.tolist():
            del self.residents[handle]
        for admission in plan.admissions:
            assert admission.handle not in self.residents
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
        owned = [block for r in self.residents.values() if not r.ended for block in r.table]
        assert len(owned) == len(set(owned)), "a block has two owners"

    def _compute(self, handle: int, resident: Resident, count: int) -> None:
        assert 1 <= count <= len(resident.tokens) - resident.num_computed
        for position in range(resident.num_computed, resident.num_computed + count):
            slot = self._slot(resident, position)
            self.pool[slot] = (handle, position)
        resident.num_computed += count
        for position in range(resident.num_computed):
            assert self.pool[self._slot(resident, position)] == (handle, position)

    def _slot(self, resident: Resident, position: int) -> int:
        block = resident.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _sample(self, handle: int, resident: Resident) -> tuple[int, EndFlag | None]:
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
