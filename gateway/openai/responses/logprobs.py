"""Log-probabilities as answers have them."""

from typing import Any

from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for what cannot happen.
_LOWEST_LOGPROB = -9999.0


def prompt_logprobs_body(prompt: PromptScores, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Scores by token id for each position of a prompt: of the likeliest tokens and its own."""

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    places: list[dict[str, Any] | None] = []
    for token, scores in prompt:
        if scores is None:
            places.append(None)
            continue
        top = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        place = {
            str(other): shown(other, logprob, rank) for rank, (other, logprob) in enumerate(top, 1)
        }
        place.setdefault(str(token), shown(token, scores.logprob, None))
        places.append(place)
    return places


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(float(logprob), _LOWEST_LOGPROB)
