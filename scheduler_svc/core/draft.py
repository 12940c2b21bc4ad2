"""A step plan while it is being put together."""

from dataclasses import dataclass, field

import numpy as np

from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages import Admission, StepPlan


@dataclass(slots=True)
class PlanDraft:
    """Lists that become the arrays of a StepPlan."""

    step: int
    budget: int = 0  # tokens that may still be added
    admissions: list[Admission] = field(default_factory=list)
    grown_handles: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    chunk_handles: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)

    def grow(self, handle: int, block: int) -> None:
        """Append a block to a table that the worker has."""
        self.grown_handles.append(handle)
        self.grown_blocks.append(block)

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
        retired: list[int],
    ) -> StepPlan:
        """The plan, with what is known only at the end."""
        return StepPlan(
            step=self.step,
            now_ms=now_ms,
            requests_cursor=str(requests_cursor),
            outputs_cursor=str(outputs_cursor),
            outputs_min_id=str(outputs_min_id),
            retired=_packed(retired),
            admissions=tuple(self.admissions),
            grown_handles=_packed(self.grown_handles),
            grown_blocks=_packed(self.grown_blocks),
            chunk_handles=_packed(self.chunk_handles),
            chunk_tokens=_packed(self.chunk_tokens),
        )


def _packed(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
