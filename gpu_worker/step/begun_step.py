"""A step that was begun and is not finished, and how its result is made."""

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
        plan: of the step.
        began_s: when queueing began, by ``time.perf_counter``.
        num_tokens: that the step computes.
        advanced: its R rows, one for each sequence that samples.
        outcome: its tokens and times on the device.
        candidates: of its beam groups.
        logprobs: of sampled tokens, for requests that want them.
        scored: log-probabilities of prompt tokens.
        ended_before: handles of sequences that, as was found later, had ended before this step.
        grammar_rows: rows that follow a grammar; None: there are none.
        taken: whether grammars have their tokens.
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
    grammar_rows: npt.NDArray[np.int64] | None = None
    taken: bool = False

    def wait(self) -> None:
        """Wait until the device has finished the step; callable from any thread."""
        self.outcome.wait()

    def result(
        self,
        tokens: npt.NDArray[np.int64],  # [R]
        flags: npt.NDArray[np.int32],  # [R]
        model_s: float,
        step_s: float,
    ) -> StepResult:
        """The step's result, without the rows of sequences that had ended before."""
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
