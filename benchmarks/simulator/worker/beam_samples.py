"""Continuations of beams without a model: how likely tokens are is drawn at random.

The probabilities of the next token's candidates are what is left of a stick that is broken again
and again (a Griffiths-Engen-McCloskey process). A beam survives a round if it has candidates among
the likeliest of all beams, as in a real search.

The beams of a search are nearly the same text, so mostly the same tokens are as likely after each
of them. Then their distance stays what it was: beams that parted long ago live on side by side.
Only when the draws are each beam's own can one beam outrun all others.
"""

from collections.abc import Sequence

import numpy as np

from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates
from shared.messages.plans import BeamStep

# Each break takes this share of what is left: Beta(0.8, 0.6). With these two the likeliest token
# has a probability of 0.6 on average, often near 1 and often small, as language models' have.
_TAKEN = (0.8, 0.6)
# Share of the steps in which all beams of a search draw alike. Fitted to one number: with it beam
# search of width 6 on Alpaca saves what the PagedAttention paper's Fig. 15 says, 55.16 %.
_ALIKE = 0.93


class BeamDraws:
    """Answers for the beams of a step.

    Args:
        random: where all draws come from.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def candidates(
        self, steps: Sequence[BeamStep], widths: Sequence[int], are_last: Sequence[bool]
    ) -> tuple[BeamCandidates, ...]:
        """The likeliest continuations of each group of beams, best first.

        Args:
            steps: one per group.
            widths: beams that each keeps.
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
