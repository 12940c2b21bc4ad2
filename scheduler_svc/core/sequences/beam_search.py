"""Beam search over one prompt, with the outcome of transformers' ``generate(num_beams=width)``.

Only tokens and scores of beams; `block_tables` keeps the blocks that they share.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.config import ProtocolError
from shared.codec import FloatArray, IntArray
from shared.errors import DecodeError
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import BeamCandidates, ChoiceState, Hypothesis
from shared.sampling import BeamParams, EarlyStopping


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt, one token longer than ``before``, which siblings share."""

    before: "Beam | None"
    token: int
    score: float  # sum of the log-probabilities up to here
    length: int  # generated tokens

    def tokens(self) -> IntArray:
        """Generated tokens, [length]."""
        found = np.empty(self.length, np.int32)
        for beam in self._backwards():
            found[beam.length - 1] = beam.token
        return found

    def scores(self) -> FloatArray:
        """Sums of log-probabilities up to each token, [length]."""
        found = np.empty(self.length, np.float32)
        for beam in self._backwards():
            found[beam.length - 1] = beam.score
        return found

    def _backwards(self) -> "list[Beam]":
        found: list[Beam] = []
        beam = self
        while beam.before is not None:
            found.append(beam)
            beam = beam.before
        return found


NOTHING_YET = Beam(None, -1, 0.0, 0)


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A beam that has ended."""

    beam: Beam
    score: float  # with the length penalty
    reason: FinishReason

    def hypothesis(self) -> Hypothesis:
        """The same as a message."""
        return Hypothesis(self.beam.tokens(), self.beam.scores(), self.score, self.reason)


@dataclass(frozen=True, slots=True)
class BeamRound:
    """Result of a round, in indices of the beams that ran before it."""

    parents: list[int]  # parent of each beam that runs now
    finished: list[int]  # parents of beams that finished and are among the best


class BeamSearch:
    """The beams of one prompt.

    Args:
        params: of the request.
        max_output: tokens that a beam may generate.
        running: beams that continue, likeliest first.
        finished: beams that have ended, best first.

    Attributes:
        running: as the argument; all have the same length.
        done: whether the best ``width`` finished beams are final.
    """

    def __init__(
        self,
        params: BeamParams,
        max_output: int,
        running: Sequence[Beam] = (NOTHING_YET,),
        finished: Sequence[FinishedBeam] = (),
    ) -> None:
        self.params = params
        self.running = list(running)
        self.done = False
        self._max_output = max_output
        self._finished = list(finished)

    @staticmethod
    def restored(
        params: BeamParams, max_output: int, choices: Sequence[ChoiceState]
    ) -> "BeamSearch":
        """The search that ``choices`` of a RequestState describe.

        Without any choice it begins anew; without a running beam it is done.
        """
        if not choices:
            return BeamSearch(params, max_output)
        running, finished = [], []
        for choice in choices:
            beam = _restored_beam(choice)
            if choice.finish_reason:
                reason = FinishReason(choice.finish_reason)
                finished.append(FinishedBeam(beam, _penalized(beam, params), reason))
            else:
                running.append(beam)
        search = BeamSearch(params, max_output, running, finished)
        search.done = not running
        return search

    @property
    def length(self) -> int:
        """Tokens that each running beam has generated."""
        return self.running[0].length

    def choices(self, handle: int) -> list[ChoiceState]:
        """The search as choices of a RequestState; results name it by ``handle``."""
        running = [
            ChoiceState(number, handle, beam.tokens(), "", beam.scores())
            for number, beam in enumerate(self.running)
        ]
        finished = [
            ChoiceState(number, 0, found.beam.tokens(), found.reason, found.beam.scores())
            for number, found in enumerate(self._finished)
        ]
        return running + finished

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The finished beams, best first."""
        return tuple(found.hypothesis() for found in self._finished)

    def advance(self, candidates: BeamCandidates) -> BeamRound:
        """Replace the running beams by the likeliest continuations.

        Raises:
            ProtocolError: candidates of other beams.
        """
        width = self.params.width
        before = self.running
        running: list[Beam] = []
        parents: list[int] = []
        finishing: list[tuple[int, FinishedBeam]] = []
        for place, (parent, token, score, flag) in enumerate(_rows(candidates)):
            if not 0 <= parent < len(before):
                raise ProtocolError(f"candidate of beam {parent}, there are {len(before)}")
            beam = Beam(before[parent], token, score, before[parent].length + 1)
            if flag:
                # Candidates behind the first `width` only replace ended ones: they do not finish.
                if place < width:
                    reason = EndFlag(flag).finish_reason()
                    finishing.append(
                        (parent, FinishedBeam(beam, _penalized(beam, self.params), reason))
                    )
            elif len(running) < width:
                running.append(beam)
                parents.append(parent)
        kept = self._keep_best([found for _, found in finishing])
        self.running = running
        self.done = not running or not self._could_improve()
        return BeamRound(parents, [parent for parent, found in finishing if found in kept])

    def _keep_best(self, new: list[FinishedBeam]) -> list[FinishedBeam]:
        ranked = sorted(self._finished + new, key=lambda found: -found.score)
        self._finished = ranked[: self.params.width]
        return self._finished

    def _could_improve(self) -> bool:
        """Whether a running beam may still become one of the best; a heuristic unless NEVER."""
        params = self.params
        if len(self._finished) < params.width:
            return True
        if params.early_stopping == EarlyStopping.AT_ONCE:
            return False
        length = self.length
        if params.early_stopping == EarlyStopping.NEVER and params.length_penalty > 0:
            length = self._max_output
        best = _divided(self.running[0].score, length, params.length_penalty)
        return best > self._finished[-1].score


def _rows(candidates: BeamCandidates) -> list[tuple[int, int, float, int]]:
    arrays = (candidates.parents, candidates.tokens, candidates.scores, candidates.flags)
    columns = [array.tolist() for array in arrays]
    try:
        return list(zip(*columns, strict=True))
    except ValueError:
        sizes = [len(column) for column in columns]
        raise ProtocolError(f"candidates with columns of {sizes} rows") from None


def _penalized(beam: Beam, params: BeamParams) -> float:
    return _divided(beam.score, beam.length, params.length_penalty)


def _divided(score: float, length: int, length_penalty: float) -> float:
    """A sum of log-probabilities divided by ``length**length_penalty``, kept finite."""
    try:
        divided: float = score / length**length_penalty
    except OverflowError:
        return 0.0
    except ZeroDivisionError:
        return -sys.float_info.max
    return max(divided, -sys.float_info.max)


def _restored_beam(choice: ChoiceState) -> Beam:
    beam = NOTHING_YET
    if len(choice.output) != len(choice.scores):
        num_tokens, num_scores = len(choice.output), len(choice.scores)
        raise DecodeError(f"a beam of {num_tokens} tokens with {num_scores} scores")
    for token, score in zip(choice.output.tolist(), choice.scores.tolist(), strict=True):
        beam = Beam(beam, token, score, beam.length + 1)
    return beam
