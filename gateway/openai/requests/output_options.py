"""What an answer shows of the generated tokens, from the fields of a body."""

from dataclasses import dataclass

from gateway.http.errors import invalid_value
from gateway.openai.requests.schema import ChatBody, CompletionBody, GenerationBody


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the tokens are shown to the client; the engine does not use it."""

    stops: tuple[str, ...]
    min_tokens: int  # stop strings are not looked for in the text of so many first tokens
    num_logprobs: int | None
    echo: bool
    generate: bool  # False: only the prompt is looked at; the one token generated is dropped
    token_ids: bool
    num_choices: int  # shown for each prompt
    num_candidates: int  # generated for each prompt, or beams; the likeliest are shown
    num_prompt_logprobs: int | None = None  # beside what is echoed; None: no log-probabilities
    include_stop: bool = False  # what ended a text stands at its end

    @property
    def is_ranked(self) -> bool:
        """More choices are generated than shown."""
        return self.num_candidates > self.num_choices


def completion_output(body: CompletionBody) -> OutputOptions:
    """Output options of a completion."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        reason = "must be at least 1 unless echo is true or prompt_logprobs is given"
        raise invalid_value("max_tokens", 0, reason)
    num_choices = body.n or 1
    num_candidates = num_choices if body.best_of is None else body.best_of
    if num_candidates < num_choices:
        raise invalid_value(
            "best_of", num_candidates, f"must be at least n, which is {num_choices}"
        )
    may_rank = body.best_of is not None and body.best_of > 1 and not body.use_beam_search
    if body.stream and may_rank:
        reason = "which is best is known at the end only, so there is nothing to stream"
        raise invalid_value("best_of", num_candidates, reason)
    return OutputOptions(
        stops=_stops(body),
        min_tokens=body.min_tokens or 0,
        num_logprobs=body.logprobs,
        echo=bool(body.echo),
        generate=body.max_tokens != 0,
        token_ids=bool(body.return_token_ids),
        num_choices=num_choices,
        num_candidates=num_candidates,
        num_prompt_logprobs=_prompt_logprobs(body),
        include_stop=bool(body.include_stop_str_in_output),
    )


def chat_output(body: ChatBody) -> OutputOptions:
    """Output options of a chat."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", body.top_logprobs, "needs logprobs to be true")
    return OutputOptions(
        stops=_stops(body),
        min_tokens=body.min_tokens or 0,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=False,
        generate=True,
        token_ids=bool(body.return_token_ids),
        num_choices=body.n or 1,
        num_candidates=body.n or 1,
        num_prompt_logprobs=_prompt_logprobs(body),
        include_stop=bool(body.include_stop_str_in_output),
    )


def _stops(body: GenerationBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _prompt_logprobs(body: GenerationBody) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        reason = "an answer in one piece has them; leave stream out"
        raise invalid_value("prompt_logprobs", body.prompt_logprobs, reason)
    return body.prompt_logprobs
