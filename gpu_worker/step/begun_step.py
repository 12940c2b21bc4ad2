"""A step between its beginning and its end, and the result that it becomes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.batch import Advanced
from gpu_worker.step.outcome import Outcome
from shared.codec import IntArray
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import BeamCandidates, PromptLogprobs, StepResult
from shared.messages.plans import StepPlan


@dataclass(slots=True)
class BegunStep:
    """A step whose work is queued, and what its result needs beyond the tokens.

    Attributes:
        began_s: when its work began to be queued.
        num_tokens: that it computes.
        advanced: its rows, one for each sequence that samples: R of them.
        outcome: what the device has of it.
        ended_before: handles of sequences that are known only since then to have ended before it.
    """

    plan: StepPlan
    began_s: float
    num_tokens: int
    advanced: Advanced
    outcome: Outcome
    candidates: tuple[BeamCandidates, ...]
    logprobs: Sequence[TokenLogprobs]
    scored: tuple[PromptLogprobs, ...]
    ended_before: list[int] = field(default_factory=list)

    def wait(self) -> None:
        """Until the device is done with it; from any thread."""
        self.outcome.wait()

    def result(
        self,
        tokens: npt.NDArray[np.int64],  # [R]
        flags: npt.NDArray[np.int32],  # [R]
        model_s: float,
        step_s: float,
    ) -> StepResult:
        """What there is to tell, without the sequences that had ended before."""
        handles, logprobs = self.advanced.handles, self.logprobs
        if self.ended_before:
            rows = np.flatnonzero(~np.isin(handles, self.ended_before))
            places = {row: place for place, row in enumerate(rows.tolist())}
            handles, tokens, flags = handles[rows], tokens[rows], flags[rows]
            logprobs = tuple(
                replace(found, row=places[found.row]) for found in logprobs if found.row in places
            )
        ended = flags.nonzero()[0]
        return StepResult(
            step=self.plan.step,
            handles=handles,
            tokens=tokens.astype(np.int32),
            ended_rows=ended.astype(np.int32),
            ended_flags=flags[ended],
            beams=self.candidates,
            logprobs=logprobs,
            prompt_logprobs=self.scored,
            admitted_handles=_packed(new.handle for new in self.plan.admissions),
            admitted_computed=_packed(new.num_computed for new in self.plan.admissions),
            num_batched_tokens=self.num_tokens,
            model_us=int(model_s * 1e6),
            step_us=int(step_s * 1e6),
        )


def _packed(numbers: Iterable[int]) -> IntArray:
    return np.array(list(numbers), np.int32)
