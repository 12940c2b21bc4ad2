"""What stands in ``{E}:outputs``, from workers and the scheduler to gateways."""

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
    """The likeliest continuations of a beam group, best first.

    ``max(2, 1 + number of end tokens) * width`` of them, so that ``width`` beams can go on however
    many end, or all there are.
    """

    group: int
    parents: IntArray  # [k] index into BeamStep.handles
    tokens: IntArray  # [k]
    scores: FloatArray  # [k] sum of log-probabilities, the parent's included
    flags: IntArray  # [k] EndFlag, 0 where the beam could go on


@message
@dataclass(frozen=True, slots=True, eq=False)
class StepResult(Message):
    """What one step produced. Entry id ``<epoch>-*``; steps are dense within an epoch."""

    step: int
    handles: IntArray  # [num_sampled]
    tokens: IntArray  # [num_sampled] one new token for each handle
    ended_rows: IntArray  # [num_ended] indices into handles
    ended_flags: IntArray  # [num_ended] EndFlag
    beams: tuple[BeamCandidates, ...]  # one for each BeamStep of the plan
    logprobs: LogprobList
    prompt_logprobs: tuple[PromptLogprobs, ...]
    admitted_handles: IntArray  # [a] sequences that the plan admitted, and
    admitted_computed: IntArray  # [a] how many of their tokens came from the prefix cache
    num_batched_tokens: int
    model_us: int  # forward pass
    step_us: int  # all of the step, from having the plan to having the result


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """One choice of a request, as the log knows it; in a beam search, one beam.

    Beams that run come in their order, then those that have finished, best first.
    """

    choice: int  # index in its request; of a beam: among those that run, or have finished
    handle: int  # StepResults speak of the choice, or of its beam group, under this from here on
    output: IntArray  # [num_generated]
    finish_reason: str  # "" while it runs
    # [num_generated] sums of log-probabilities up to each token, of a beam
    scores: FloatArray = field(default_factory=_no_scores)


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestState(Message):
    """All of an unfinished request at this position of the log.

    Written on acceptance, after a new epoch and before trimming. It replaces whatever a reader
    knew of the request, and retires its earlier handles. Where an entry in front of it that is kept
    as long has the prompt, the Submit is without it.
    """

    submit: Submit
    choices: tuple[ChoiceState, ...]
    requests_cursor: str  # requests up to here are in outputs: gateways may trim them
    num_deaths: int = 0  # of workers, one after the other, that were computing it
    was_admitted: bool = False  # it was admitted once, even if it has no token yet
    step: int = 0  # of the epoch: what its handles got up to here is in it
    arrival: int = 0  # requests were accepted in the order of these numbers, in all epochs
    accepted_ms: int = 0  # when, by the engine's clock


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestEnded(Message):
    """A request ended otherwise than by the flags of its StepResults. The first one counts."""

    request_id: str
    reason: str  # FinishReason
    error: str  # "" unless something went wrong
    requests_cursor: str
    for_all: bool = False  # OVERLOADED: any other request would be refused, too


@message
@dataclass(frozen=True, slots=True, eq=False)
class ChoiceEnded(Message):
    """One of several choices ended otherwise than by a flag; the request goes on."""

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
    """A beam search is over: all of its choices at once, best first. The request has ended."""

    request_id: str
    hypotheses: tuple[Hypothesis, ...]  # as many as the request has choices
    requests_cursor: str


OutputsMessage = RequestState | ChoiceEnded | BeamsEnded | RequestEnded
"""What stands in ``outputs`` beside EpochStarted and StepResult, each with a requests cursor."""
