"""Draws continuations of beams without a model, with random probabilities of tokens.

The probabilities of the next token's candidates come from a stick-breaking (Griffiths-Engen-
McCloskey) process. A beam survives a round if it has candidates among the best of all beams, as in
a real search.

The beams of a search are nearly the same text, so mostly the same tokens are as likely after each
of them. Then their distance stays constant, and beams that parted long ago both survive. Only when
each beam draws independently can one beam outrun all others.
"""

from collections.abc import Sequence

import numpy as np

from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates
from shared.messages.plans import BeamStep

# Each break takes this share of the rest: Beta(0.8, 0.6). With it the most likely token has a
# probability of 0.6 on average, often near 1 and often small, as with language models.
_TAKEN = (0.8, 0.6)
# Share of the steps in which all beams of a search draw alike. It is fitted to one number: the
# saving of beam search of width 6 on Alpaca in the PagedAttention paper's Fig. 15, 55.16 %.
_ALIKE = 0.93


class BeamDraws:
    """Draws candidates for the beams of a step.

    Args:
        random: source of all draws.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def candidates(
        self, steps: Sequence[BeamStep], widths: Sequence[int], are_last: Sequence[bool]
    ) -> tuple[BeamCandidates, ...]:
        """The best continuations of each group of beams, best first.

        Args:
            steps: one per group.
            widths: number of beams of each group.
            are_last: whether the group's beams reach their length with this token.
        """
        found: dict[int, BeamCandidates] = {}
        alike: dict[tuple[int, int], list[int]] = {}
        for number, (step, width) in enumerate(zip(steps, widths, strict=True)):
            alike.setdefault((len(step.handles), width), []).append(number)
        for (num_beams, width), numbers in alike.items():
            scores = np.stack([steps[number].scores for number in numbers])  # [G, num_beams]
            parents, totals = self._best(scores, num_beams, width)
            for row, number in enumerate(numbers):
                flag = EndFlag.LENGTH if are_last[number] else 0
                found[number] = BeamCandidates(
                    steps[number].group,
                    parents[row],
                    np.arange(width, dtype=np.int32),
                    totals[row],
                    np.full(width, flag, np.int32),
                )
        return tuple(found[number] for number in range(len(steps)))

    def _best(self, scores: np.ndarray, num_beams: int, width: int) -> tuple[IntArray, np.ndarray]:
        """Parents and scores of the best continuations, both [G, width]."""
        taken = self._random.beta(*_TAKEN, size=(len(scores), num_beams, width))
        common = self._random.beta(*_TAKEN, size=(len(scores), 1, width))
        are_alike = self._random.random((len(scores), 1, 1)) < _ALIKE
        taken = np.clip(np.where(are_alike, common, taken), 1e-6, 1 - 1e-6)
        left = np.cumsum(np.log1p(-taken), axis=2)
        logprobs = np.log(taken)
        logprobs[:, :, 1:] += left[:, :, :-1]
        totals = (scores[:, :, None] + logprobs).reshape(len(scores), -1)
        best = np.argsort(-totals, axis=1, kind="stable")[:, :width]
        parents = (best // width).astype(np.int32)
        return parents, np.take_along_axis(totals, best, axis=1).astype(np.float32)
