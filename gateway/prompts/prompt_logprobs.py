"""Log-probabilities of a prompt's tokens, as answers show them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from gateway.http.errors import failed
from gateway.prompts.prompt import Prompt
from gateway.text.choice_text import ScoredToken
from gateway.text.tokenizer import Tokenizer
from shared.messages.logprobs import TokenLogprobs

PromptScores = list[tuple[int, TokenLogprobs | None]]  # tokens; None for the first one


def prompt_scores(
    tokens: Sequence[int], found: Mapping[int, TokenLogprobs], num_top: int
) -> PromptScores:
    """All tokens of a prompt with their scores.

    Args:
        found: the engine's scores by position; they may hold more of the likeliest tokens than are
            shown.
        num_top: the likeliest tokens to show at each position.

    Raises:
        ApiError: 500, the engine did not send all scores.
    """
    shown: PromptScores = [(tokens[0], None)]
    for position, token in enumerate(tokens[1:], 1):
        scores = found.get(position)
        if scores is None:
            raise failed(f"the log-probability of prompt token {position} is missing")
        if len(scores.top_ids) > num_top:
            top_ids, top_logprobs = scores.top_ids[:num_top], scores.top_logprobs[:num_top]
            scores = replace(scores, top_ids=top_ids, top_logprobs=top_logprobs)
        shown.append((token, scores))
    return shown


def echoed_scores(prompt: Prompt, scores: PromptScores, tokenizer: Tokenizer) -> list[ScoredToken]:
    """Scores of a prompt with the offsets of its tokens in the echoed text."""
    places = zip(scores, _offsets(prompt, tokenizer), strict=True)
    return [ScoredToken(token, offset, each) for (token, each), offset in places]


def _offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Characters before each token of a prompt in its echoed text."""
    if prompt.text is not None:
        offsets = tokenizer.offsets(prompt.text)
        if offsets is not None and len(offsets) == len(prompt.tokens):
            return offsets
    detokenizer = tokenizer.detokenizer()
    ends = accumulate((len(detokenizer.push(token)) for token in prompt.tokens), initial=0)
    return list(ends)[:-1]
