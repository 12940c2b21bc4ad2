"""From a validated body to requests that the engine can certainly serve, or a 400 that says why."""

import secrets
from dataclasses import dataclass

from gateway.engine import Engine
from gateway.errors import invalid, invalid_value, too_long
from gateway.schema import ChatBody, CompletionBody, GenerationBody
from shared.sampling import SamplingParams

_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one choice continues."""

    tokens: list[int]
    text: str | None  # as the client gave it, None if it gave tokens
    path: str  # field of the body that it came from


@dataclass(frozen=True, slots=True)
class Output:
    """What the client wants to see of the tokens; the engine need not know."""

    stops: tuple[str, ...]
    min_tokens: int  # stop strings are not looked for in the text of so many first tokens
    num_logprobs: int | None
    echo: bool
    generate: bool  # False: only the prompt is looked at; the one token generated is dropped
    token_ids: bool


def completion_output(body: CompletionBody) -> Output:
    """What a completion shows."""
    if body.max_tokens == 0 and not body.echo:
        raise invalid_value("max_tokens", 0, "must be at least 1 unless echo is true")
    return Output(
        stops=_stops(body),
        min_tokens=body.min_tokens or 0,
        num_logprobs=body.logprobs,
        echo=bool(body.echo),
        generate=body.max_tokens != 0,
        token_ids=bool(body.return_token_ids),
    )


def chat_output(body: ChatBody) -> Output:
    """What an answer in a conversation shows."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", body.top_logprobs, "needs logprobs to be true")
    return Output(
        stops=_stops(body),
        min_tokens=body.min_tokens or 0,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=False,
        generate=True,
        token_ids=bool(body.return_token_ids),
    )


def completion_max_tokens(body: CompletionBody, prompt: Prompt, engine: Engine) -> int:
    """How many tokens to generate at most."""
    explicit = 1 if body.max_tokens == 0 else body.max_tokens
    return _max_tokens(explicit, _COMPLETION_MAX_TOKENS, "max_tokens", prompt, engine)


def chat_max_tokens(body: ChatBody, prompt: Prompt, engine: Engine) -> int:
    """How many tokens to generate at most: by default all that fit."""
    field, explicit = "max_completion_tokens", body.max_completion_tokens
    if explicit is None:
        field, explicit = "max_tokens", body.max_tokens
    elif body.max_tokens not in (None, explicit):
        raise invalid_value(
            "max_tokens", body.max_tokens, f"max_completion_tokens says {explicit}; give one"
        )
    if explicit == 0:
        raise invalid_value(field, 0, "must be at least 1")
    return _max_tokens(explicit, None, field, prompt, engine)


def sampling_params(
    body: GenerationBody, output: Output, max_tokens: int, engine: Engine
) -> SamplingParams:
    """The engine's part of the request."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_value("min_tokens", min_tokens, f"at most {max_tokens} will be generated")
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_vocabulary("stop_token_ids", stop_token_ids, engine)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        num_logprobs=output.num_logprobs,
        num_prompt_logprobs=output.num_logprobs if output.echo else None,
    )


def check_prompt(prompt: Prompt, engine: Engine) -> None:
    """Refuse tokens that the model does not have, and prompts that leave no room for an answer."""
    if not prompt.tokens:
        raise invalid(prompt.path, f"{prompt.path}: the prompt is empty, and the model has no bos")
    length = len(prompt.tokens)
    if length >= engine.model.max_model_len:
        raise too_long(
            f"the prompt has {length} tokens; the model's context is "
            f"{engine.model.max_model_len} tokens, prompt and output together",
            prompt.path,
        )
    if length >= engine.pool_tokens:
        raise too_long(
            f"the prompt has {length} tokens; the whole KV cache holds {engine.pool_tokens}, "
            "prompt and output together",
            prompt.path,
        )
    _check_vocabulary(prompt.path, prompt.tokens, engine)


def _max_tokens(
    explicit: int | None, default: int | None, field: str, prompt: Prompt, engine: Engine
) -> int:
    length = len(prompt.tokens)
    room = engine.capacity_tokens - length
    if explicit is None:
        return room if default is None else min(default, room)
    if explicit > room:
        model, pool = engine.model.max_model_len, engine.pool_tokens
        what = "model's context is" if model <= pool else "whole KV cache holds"
        raise too_long(
            f"the prompt has {length} tokens and {field} is {explicit}, together "
            f"{length + explicit}; the {what} {min(model, pool)} tokens",
            field,
        )
    return explicit


def _check_vocabulary(path: str, tokens: list[int] | tuple[int, ...], engine: Engine) -> None:
    size = engine.model.vocab_size
    if tokens and max(tokens) >= size:
        index = next(index for index, token in enumerate(tokens) if token >= size)
        raise invalid_value(
            f"{path}[{index}]", tokens[index], f"the vocabulary has the tokens 0 to {size - 1}"
        )


def _stops(body: GenerationBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
