"""Messages of ``{E}:outputs``, from workers and the scheduler to gateways."""

from dataclasses import dataclass, field

import numpy as np

from shared.codec import FloatArray, IntArray, Message, message
from shared.messages.logprobs import LogprobList
from shared.messages.requests import Submit


def _no_scores() -> FloatArray:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt tokens, computed by a prompt chunk."""

    handle: int
    positions: LogprobList


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The most likely continuations of a beam group, best first.

    There are k = ``max(2, 1 + number of end tokens) * width`` of them, so that ``width`` beams can
    continue however many end; fewer if there are no more.
    """

    group: int
    parents: IntArray  # [k] index into BeamStep.handles
    tokens: IntArray  # [k]
    scores: FloatArray  # [k] sum of log-probabilities, the parent's included
    flags: IntArray  # [k] EndFlag, 0 where the beam could continue


@message
@dataclass(frozen=True, slots=True, eq=False)
class StepResult(Message):
    """The result of one step. Entry id ``<epoch>-*``; steps are dense within an epoch."""

    step: int
    handles: IntArray  # [num_sampled]
    tokens: IntArray  # [num_sampled] one new token for each handle
    ended_rows: IntArray  # [num_ended] indices into handles
    ended_flags: IntArray  # [num_ended] EndFlag
    beams: tuple[BeamCandidates, ...]  # one for each BeamStep of the plan
    logprobs: LogprobList
    prompt_logprobs: tuple[PromptLogprobs, ...]
    admitted_handles: IntArray  # [a] sequences that the plan admitted
    admitted_computed: IntArray  # [a] how many of their tokens came from the prefix cache
    num_batched_tokens: int
    model_us: int  # forward pass
    step_us: int  # all of the step, from having the plan to having the result


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """The state of one choice of a request; in a beam search, of one beam.

    Running beams come first, in their order, then finished ones, best first.
    """

    choice: int  # index in its request; of a beam: among the running, or the finished ones
    handle: int  # of the choice, or of its beam group, in all later StepResults
    output: IntArray  # [num_generated]
    finish_reason: str  # "" while it runs
    # [num_generated] sums of log-probabilities up to each token, of a beam
    scores: FloatArray = field(default_factory=_no_scores)


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestState(Message):
    """The whole state of an unfinished request at this position of the log.

    Written on acceptance, after a new epoch and before trimming. It replaces the state that a
    reader has of the request, and retires its earlier handles. The Submit is without its prompt,
    which is in the entry ``prompt_at`` of ``prompts``, or which an earlier state that is kept as
    long as this one has or refers to.
    """

    submit: Submit
    choices: tuple[ChoiceState, ...]
    requests_cursor: str  # requests up to here are reflected in outputs: gateways may trim them
    num_deaths: int = 0  # workers in a row that died while they computed it
    was_admitted: bool = False  # it was admitted once, even if it has no token yet
    step: int = 0  # of the epoch: the state includes results up to this step
    arrival: int = 0  # rises in the order of acceptance, across epochs
    accepted_ms: int = 0  # time of acceptance by the engine's clock
    prompt_at: str = ""  # entry of ``prompts`` that has the prompt; "": the state refers to none

    @property
    def has_prompt(self) -> bool:
        """Whether the state has the prompt, or refers to the entry that has it."""
        return self.prompt_at != "" or not self.submit.lacks_prompt

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt that the state refers to."""
        return self.submit.prompt.itemsize * self.submit.omitted_tokens if self.prompt_at else 0


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestEnded(Message):
    """A request ended for another reason than a flag of a StepResult. The first one counts."""

    request_id: str
    reason: str  # FinishReason
    error: str  # "" unless something went wrong
    requests_cursor: str
    for_all: bool = False  # OVERLOADED: any other request would be refused as well


@message
@dataclass(frozen=True, slots=True, eq=False)
class ChoiceEnded(Message):
    """One of several choices ended for another reason than a flag; the request continues."""

    request_id: str
    choice: int
    reason: str  # FinishReason
    requests_cursor: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    tokens: IntArray  # [num_generated]
    scores: FloatArray  # [num_generated] sums of log-probabilities up to each token
    score: float  # the last of them, divided by num_generated ** length_penalty
    finish_reason: str  # FinishReason


@message
@dataclass(frozen=True, slots=True, eq=False)
class BeamsEnded(Message):
    """The end of a beam search, with all choices of the request, best first."""

    request_id: str
    hypotheses: tuple[Hypothesis, ...]  # as many as the request has choices
    requests_cursor: str


OutputsMessage = RequestState | ChoiceEnded | BeamsEnded | RequestEnded
"""Messages of ``outputs`` with a requests cursor: all but EpochStarted and StepResult."""
