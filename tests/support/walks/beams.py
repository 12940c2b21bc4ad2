"""The beam searches of a random walk's clients, done naively, to check the log."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates, ChoiceState, Hypothesis
from shared.sampling import BeamParams, EarlyStopping

Continuation = tuple[int, float, int]  # token, its (negative) score, EndFlag or 0


def tag_after(before: int, token: int) -> int:
    """Tag of a slot's content: this token and all tokens before it."""
    return hash((before, token))


def continuations(tag: int, count: int, vocabulary: int, end: EndFlag | None) -> list[Continuation]:
    """The possible continuations of a beam; at most one is an end, unless all are.

    Args:
        tag: of the beam's last token.
        end: LENGTH if the next token is the last in any case, STOP if one of them is.
    """
    found = []
    for index in range(count):
        is_stop = end is EndFlag.STOP and index == tag % count
        flag = end if is_stop or end is EndFlag.LENGTH else 0
        # Scores are fractions that float32 adds up exactly.
        cost = ((tag >> 3 * index % 60) % 61 + 1) / 64
        found.append(((tag + index * 131) % vocabulary, cost, int(flag or 0)))
    return found


@dataclass(frozen=True, slots=True)
class Beam:
    """The generated tokens, the sum of scores up to each token, and the tag of the last."""

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    tag: int

    @property
    def score(self) -> float:
        """Score of all its tokens."""
        return self.scores[-1] if self.scores else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A beam that has ended."""

    beam: Beam
    score: float  # with the length penalty
    reason: str  # FinishReason


@dataclass
class Search:
    """The state of a search by the log, by the number of rounds in it.

    Args:
        params: of the request.
        prompt_tag: tag of the prompt's last token.
        stop_period: a beam may end at about one in so many tokens.
        max_output: tokens that a beam may generate.
        vocabulary: number of tokens.
    """

    params: BeamParams
    prompt_tag: int
    stop_period: int
    max_output: int
    vocabulary: int
    running: list[Beam] = field(init=False)
    finished: list[Finished] = field(default_factory=list)
    num_rounds: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self.running = [Beam((), (), self.prompt_tag)]

    def candidates(self) -> list[tuple[int, Beam, int]]:
        """The best continuations of all beams: parents, tokens and scores, and flags."""
        return [
            (parent, _continued(self.running[parent], token, score), flag)
            for score, parent, token, flag in self.ranked(
                [(beam.tag, beam.score) for beam in self.running], self.num_rounds
            )
        ]

    def ranked(
        self, beams: list[tuple[int, float]], num_generated: int
    ) -> list[tuple[float, int, int, int]]:
        """Scores, parents, tokens and flags of a worker's candidates, best first.

        Args:
            beams: tags and scores.
            num_generated: tokens that each beam has.
        """
        count = 2 * self.params.width
        found = []
        for parent, (tag, before) in enumerate(beams):
            end = EndFlag.STOP if (tag >> 7) % self.stop_period == 0 else None
            if num_generated + 1 == self.max_output:
                end = EndFlag.LENGTH
            for token, cost, flag in continuations(tag, count, self.vocabulary, end):
                found.append((before - cost, parent, token, flag))
        found.sort(key=lambda candidate: -candidate[0])
        return found[:count]

    def advance(self, result: BeamCandidates) -> None:
        """Apply a worker's result, which must be that of the running beams."""
        assert not self.is_over, "a search goes on behind its end"
        found = self.candidates()
        columns = [result.parents, result.tokens, result.scores, result.flags]
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        expected = [(parent, beam.tokens[-1], beam.score, flag) for parent, beam, flag in found]
        assert rows == expected, f"round {self.num_rounds}: {rows} for {expected}"
        self.num_rounds += 1
        width, penalty = self.params.width, self.params.length_penalty
        for _, beam, flag in found[:width]:
            if flag:
                score = beam.score / len(beam.tokens) ** penalty
                self.finished.append(Finished(beam, score, EndFlag(flag).finish_reason()))
        self.finished.sort(key=lambda ended: -ended.score)
        del self.finished[width:]
        self.running = [beam for _, beam, flag in found if not flag][:width]
        self.is_over = not self.running or not self._could_improve()

    def check_state(self, choices: Sequence[ChoiceState]) -> None:
        """Check that a RequestState has exactly the known state."""
        result = [(c.output.tolist(), c.scores.tolist(), c.finish_reason) for c in choices]
        known = [(list(beam.tokens), list(beam.scores), "") for beam in self.running]
        known += [(list(f.beam.tokens), list(f.beam.scores), f.reason) for f in self.finished]
        assert result == known, f"{result} for {known}"

    def check_end(self, hypotheses: tuple[Hypothesis, ...]) -> None:
        """Check that a BeamsEnded has exactly the finished beams."""
        assert self.is_over, "a search ends before its end"
        result = [
            (h.tokens.tolist(), h.scores.tolist(), h.score, h.finish_reason) for h in hypotheses
        ]
        known = [
            (list(f.beam.tokens), list(f.beam.scores), f.score, f.reason) for f in self.finished
        ]
        assert result == known, f"{result} for {known}"

    def _could_improve(self) -> bool:
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping == EarlyStopping.AT_ONCE:
            return False
        never = params.early_stopping == EarlyStopping.NEVER and params.length_penalty > 0
        length = self.max_output if never else self.num_rounds
        best: float = self.running[0].score / length**params.length_penalty
        return best > self.finished[-1].score


def _continued(beam: Beam, token: int, score: float) -> Beam:
    return Beam((*beam.tokens, token), (*beam.scores, score), tag_after(beam.tag, token))
