"""Log-probabilities of a prompt's tokens, for clients that ask for them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from gateway.admission import Prompt
from gateway.choices import ScoredToken
from gateway.errors import failed
from gateway.tokenizer import Tokenizer
from shared.messages.outputs import TokenLogprobs


def scored_prompt(
    prompt: Prompt, found: Mapping[int, TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[ScoredToken]:
    """All tokens of a prompt; the first one has no log-probability.

    Args:
        found: by position, as the engine told them; it may have told more of the likeliest tokens.
        num_top: that are shown.

    Raises:
        ApiError: 500, the engine did not tell all of them.
    """
    scored = []
    places = zip(prompt.tokens, _offsets(prompt, tokenizer), strict=True)
    for position, (token, offset) in enumerate(places):
        scores = found.get(position) if position else None
        if scores is None and position > 0:
            raise failed(f"the log-probability of prompt token {position} is missing")
        if scores is not None and len(scores.top_ids) > num_top:
            top_ids, top_logprobs = scores.top_ids[:num_top], scores.top_logprobs[:num_top]
            scores = replace(scores, top_ids=top_ids, top_logprobs=top_logprobs)
        scored.append(ScoredToken(token, offset, scores))
    return scored


def _offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Where the tokens of a prompt stand in what is echoed of it."""
    if prompt.text is not None:
        offsets = tokenizer.offsets(prompt.text)
        if offsets is not None and len(offsets) == len(prompt.tokens):
            return offsets
    detokenizer = tokenizer.detokenizer()
    ends = accumulate((len(detokenizer.push(token)) for token in prompt.tokens), initial=0)
    return list(ends)[:-1]
