"""Log-probabilities of a prompt's tokens, for clients that ask for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from gateway.http.errors import failed
from gateway.openai.validation import Prompt
from gateway.text.choice_text import ScoredToken
from gateway.text.tokenizer import Tokenizer
from shared.messages.logprobs import TokenLogprobs

PromptScores = list[tuple[int, TokenLogprobs | None]]  # tokens; None for the first one


def prompt_scores(
    tokens: Sequence[int], found: Mapping[int, TokenLogprobs], num_top: int
) -> PromptScores:
    """All tokens of a prompt, with what is shown of their places.

    Args:
        found: by position, as the engine told them; it may have told more of the likeliest tokens.
        num_top: of those that are shown.

    Raises:
        ApiError: 500, the engine did not tell all of them.
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
    """The same in the text that is echoed."""
    places = zip(scores, _offsets(prompt, tokenizer), strict=True)
    return [ScoredToken(token, offset, each) for (token, each), offset in places]


def _offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Where the tokens of a prompt stand in what is echoed of it."""
    if prompt.text is not None:
        offsets = tokenizer.offsets(prompt.text)
        if offsets is not None and len(offsets) == len(prompt.tokens):
            return offsets
    detokenizer = tokenizer.detokenizer()
    ends = accumulate((len(detokenizer.push(token)) for token in prompt.tokens), initial=0)
    return list(ends)[:-1]
