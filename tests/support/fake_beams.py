"""A language model with few tokens for beam searches, and a naive search.

The probability of a token depends on nothing but the tokens before it.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamCandidates
from shared.messages.plans import BeamStep
from shared.sampling import BeamParams, EarlyStopping

NUM_TOKENS = 24
ENDS = (0, 1)
_K_PER_BEAM = 1 + len(ENDS)


@cache
def logprobs(tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of the next token; some tokens are far more likely than others."""
    return tuple(-(hash((tokens, token)) % 100_003) / 9_001 for token in range(NUM_TOKENS))


def candidates(
    step: BeamStep, beams: Sequence[tuple[int, ...]], num_prompt: int, max_tokens: int, width: int
) -> BeamCandidates:
    """A worker's candidates for beams with these tokens, the prompt's included."""
    scores = np.array([logprobs(beam) for beam in beams], np.float32) + step.scores[:, None]
    best = np.argsort(-scores, axis=None, kind="stable")[: _K_PER_BEAM * width]
    parents, tokens = np.unravel_index(best, scores.shape)
    flags = np.zeros(len(best), np.int32)
    if len(beams[0]) + 1 - num_prompt == max_tokens:
        flags[:] = EndFlag.LENGTH
    flags[np.isin(tokens, ENDS)] = EndFlag.STOP
    return BeamCandidates(
        step.group,
        parents.astype(np.int32),
        tokens.astype(np.int32),
        scores.ravel()[best],
        flags,
    )


def searched(
    prompt: tuple[int, ...], max_tokens: int, params: BeamParams
) -> list[tuple[tuple[int, ...], float]]:
    """Generated tokens and score of each finished beam, best first."""
    width, penalty = params.width, params.length_penalty
    running: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    finished: list[tuple[tuple[int, ...], float]] = []
    while True:
        continued: list[tuple[tuple[int, ...], np.float32]] = [
            ((*tokens, token), score + np.float32(logprobs(prompt + tokens)[token]))
            for tokens, score in running
            for token in range(NUM_TOKENS)
        ]
        continued.sort(key=lambda found: -found[1])
        length = len(continued[0][0])
        ends = [tokens[-1] in ENDS or length == max_tokens for tokens, _ in continued]
        new = [
            (tokens, float(score) / length**penalty)
            for (tokens, score), end in zip(continued[:width], ends[:width], strict=True)
            if end
        ]
        finished = sorted(finished + new, key=lambda found: -found[1])[:width]
        kept = zip(continued, ends, strict=True)
        running = [found for found, end in kept if not end][:width]
        if not running:
            return finished
        if len(finished) == width:
            never = params.early_stopping == EarlyStopping.NEVER and penalty > 0
            best = float(running[0][1]) / (max_tokens if never else length) ** penalty
            if params.early_stopping == EarlyStopping.AT_ONCE or best <= finished[-1][1]:
                return finished
