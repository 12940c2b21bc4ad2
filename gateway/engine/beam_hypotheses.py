"""Checks what a beam search found, and turns scores into log-probabilities."""

import numpy as np

from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import BeamsEnded, Hypothesis


def find_fault(message: BeamsEnded, num_choices: int) -> str | None:
    """Why this is no answer to a search for so many choices, None if it is one."""
    found = message.hypotheses
    if len(found) != num_choices:
        return f"it has {len(found)} hypotheses, not {num_choices}"
    for index, hypothesis in enumerate(found):
        fault = _fault_of(hypothesis)
        if fault is not None:
            return f"hypothesis {index} {fault}"
    return None


def token_logprobs(hypothesis: Hypothesis) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of all tokens of a hypothesis, without alternatives."""
    sums = hypothesis.scores.astype(np.float64)
    # Sums are rounded, so that a token that was nearly certain can seem to be more than that.
    logprobs = np.minimum(np.diff(sums, prepend=0.0), 0.0)
    no_ids, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    return tuple(
        TokenLogprobs(position, logprob, no_ids, no_logprobs)
        for position, logprob in enumerate(logprobs.tolist())
    )


def _fault_of(hypothesis: Hypothesis) -> str | None:
    num_tokens, num_scores = len(hypothesis.tokens), len(hypothesis.scores)
    if num_tokens == 0:
        return "has no tokens"
    if num_scores != num_tokens:
        return f"has {num_tokens} tokens and {num_scores} scores"
    if not (np.isfinite(hypothesis.scores).all() and np.isfinite(hypothesis.score)):
        return "has a score that is no number"
    if hypothesis.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return f"ended with {hypothesis.finish_reason!r}"
    return None
