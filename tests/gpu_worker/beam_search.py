"""A beam search that selects like transformers, over the candidates of a worker."""

from dataclasses import dataclass

import numpy as np

from shared.messages.outputs import BeamCandidates, StepResult
from shared.sampling import BeamParams, EarlyStopping, SamplingParams
from tests.gpu_worker.planner import Planner, sampling


def beam_sampling(
    width: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.ESTIMATED,
    **changes: object,
) -> SamplingParams:
    """Sampling parameters of a beam search, with changes."""
    beams = BeamParams(width, length_penalty, early_stopping.value)
    return sampling(beams=beams, **changes)


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam."""

    handle: int
    output: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished beam; ``score`` includes the length penalty."""

    output: tuple[int, ...]
    score: float


class BeamSearch:
    """One group of beams on a planner, selected in float32 as ``_beam_search`` does.

    Args:
        planner: to drive the worker with.
        group: its handles are ``100 * group`` and up.
        tokens: the prompt.
        params: of the beam search.
    """

    def __init__(
        self, planner: Planner, group: int, tokens: list[int], params: SamplingParams
    ) -> None:
        assert params.beams is not None
        self.finished: list[Finished] = []
        self.is_over = False
        self.candidates: list[BeamCandidates] = []
        self.running = [Beam(100 * group, (), 0.0)]
        self.planner = planner
        self._group = group
        self.tokens = tokens
        self._params = params
        self._beams = params.beams
        self._next_handle = 100 * group + 1
        self._chosen: list[tuple[int, int]] = []  # parent handle and token, by beam
        planner.admit(100 * group, tokens, params)

    def plan_beams(self, *, with_parents: bool = True) -> None:
        """Put the beams into the next plan, in which they compute their last tokens."""
        parents, tokens = zip(*self._chosen, strict=True) if self._chosen else ((), ())
        if not with_parents:
            parents, tokens = (), ()
        self.planner.beams(
            self._group,
            [beam.handle for beam in self.running],
            [beam.score for beam in self.running],
            parents,
            tokens,
        )

    def give_up(self) -> None:
        """Retire all beams in the next plan; ``come_back`` admits them again."""
        for handle in {parent for parent, _ in self._chosen}:
            self.planner.retire(handle)

    def come_back(self) -> dict[str, int]:
        """Admit the beams with all their tokens; the chunks that compute them."""
        renamed = [Beam(self._new_handle(), beam.output, beam.score) for beam in self.running]
        self.running, self._chosen = renamed, []
        for beam in renamed:
            tokens = [*self.tokens, *beam.output]
            self.planner.admit(beam.handle, tokens, self._params, len(self.tokens))
        length = len(self.tokens) + len(renamed[0].output)
        return {f"s{beam.handle}": length for beam in renamed}

    def take(self, result: StepResult) -> None:
        """Select among a result's candidates for this group."""
        (found,) = (each for each in result.beams if each.group == self._group)
        self.candidates.append(found)
        length = len(self.running[0].output) + 1
        ranked = [
            (self.running[parent], token, np.float32(score), flag)
            for parent, token, score, flag in zip(
                found.parents.tolist(),
                found.tokens.tolist(),
                found.scores,
                found.flags.tolist(),
                strict=True,
            )
        ]
        width = self._beams.width
        ended = [
            Finished((*beam.output, token), self._scaled(score, length))
            for beam, token, score, flag in ranked[:width]
            if flag
        ]
        self.finished = sorted(self.finished + ended, key=lambda each: -each.score)[:width]
        going = [entry for entry in ranked if not entry[-1]][:width]
        if not going or self._is_closed() or not self._may_beat(going, length):
            self.is_over = True
            for handle in {beam.handle for beam in self.running}:
                self.planner.retire(handle)
        else:
            self._go_on([(beam, token, float(score)) for beam, token, score, _ in going])

    def _scaled(self, score: np.float32, length: int) -> float:
        return float(score / np.float32(length**self._beams.length_penalty))

    def _is_full(self) -> bool:
        return len(self.finished) == self._beams.width

    def _is_closed(self) -> bool:
        return self._is_full() and self._beams.early_stopping == EarlyStopping.AT_ONCE

    def _may_beat(self, going: list[tuple[Beam, int, np.float32, int]], length: int) -> bool:
        if not self._is_full():
            return True
        best = going[0][2] if going else np.float32(-1e9)
        if self._beams.early_stopping == EarlyStopping.NEVER and self._beams.length_penalty > 0:
            length = self._params.max_tokens
        return self._scaled(best, length) > self.finished[-1].score

    def _go_on(self, chosen: list[tuple[Beam, int, float]]) -> None:
        """The first child of a beam keeps its handle, others get new ones."""
        kept: set[int] = set()
        before = {beam.handle for beam in self.running}
        self.running, self._chosen = [], []
        for beam, token, score in chosen:
            handle = self._new_handle() if beam.handle in kept else beam.handle
            kept.add(beam.handle)
            self.running.append(Beam(handle, (*beam.output, token), score))
            self._chosen.append((beam.handle, token))
        for handle in before - kept:
            self.planner.retire(handle)

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1


def search(planner: Planner, *searches: BeamSearch) -> None:
    """Run searches to their ends; new prompts are computed in one chunk each."""
    new = [each for each in searches if not each.candidates]
    chunks = {f"s{each.running[0].handle}": len(each.tokens) for each in new}
    while going := [each for each in searches if not each.is_over]:
        for each in going:
            each.plan_beams()
        result = planner.step(**chunks)
        chunks = {}
        for each in going:
            each.take(result)
