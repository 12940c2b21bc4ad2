"""Turns a validated body into requests that the engine can serve, or refuses it with 400."""

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.access.priorities import PriorityRange
from gateway.engine.engine_status import Engine
from gateway.http.errors import invalid, invalid_value, too_long
from gateway.openai.requests.output_options import OutputOptions
from gateway.openai.requests.schema import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody
from gateway.prompts.prompt import Prompt
from shared.sampling import PARAMETERS, BeamParams, Effect, SamplingParams

COMPLETION_MAX_TOKENS = 16
_SEED_BITS = 63
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
# A beam search refuses these, or is the same for all their values.
_NEUTRAL_IN_SEARCHES = {
    name: parameter.neutral
    for name, parameter in PARAMETERS.items()
    if parameter.effect is Effect.SEED or not parameter.with_beams
}


def priority_of(given: int | None, of_key: PriorityRange | None, of_all: PriorityRange) -> int:
    """The priority of a request.

    Args:
        given: in its body.
        of_key: priorities that its API key allows, None where no key is required.
        of_all: priorities that are allowed then.

    Raises:
        ApiError: 400.
    """
    allowed = of_all if of_key is None else of_key
    if given is None:
        return allowed.default
    if given not in allowed:
        holder = "this server" if of_key is None else "this API key"
        reason = f"{holder} allows {allowed} (lower ones are served first)"
        raise invalid_value("priority", given, reason)
    return given


def check_num_choices(
    num_prompts: int, output: OutputOptions, is_resumable: bool, limit: int
) -> None:
    """Refuse more choices than one call may have, before any work is done.

    Args:
        is_resumable: the id of every event holds the position of every choice.
        limit: choices that a call may generate for all its prompts.

    Raises:
        ApiError: 400.
    """
    field = "best_of" if output.is_ranked else "n"
    num_choices = num_prompts * output.num_candidates
    given = f"{num_prompts} prompts with {output.num_candidates} choices each are {num_choices}"
    if num_choices > limit:
        reason = f"{given}; one call may have {limit}"
        raise invalid_value(field, output.num_candidates, reason)
    if is_resumable and num_choices > MAX_CHOICES:
        reason = f"{given}; a stream that can be resumed may have {MAX_CHOICES}"
        raise invalid_value("stream_resume", True, reason)


def completion_max_tokens(
    body: CompletionBody, prompt: Prompt, output: OutputOptions, engine: Engine
) -> int:
    """The most tokens to generate; OpenAI's default if the body has no limit."""
    explicit = 1 if body.max_tokens == 0 else body.max_tokens
    if explicit is None:
        room = engine.max_tokens_for(len(prompt.tokens), output.num_candidates)
        return min(COMPLETION_MAX_TOKENS, room)
    _check_room(explicit, "max_tokens", prompt, output, engine)
    return explicit


def chat_max_tokens(body: ChatBody, prompt: Prompt, output: OutputOptions, engine: Engine) -> int:
    """The most tokens to generate; all that fit if the body has no limit."""
    field, explicit = "max_completion_tokens", body.max_completion_tokens
    if explicit is None:
        field, explicit = "max_tokens", body.max_tokens
    elif body.max_tokens not in (None, explicit):
        raise invalid_value(
            "max_tokens", body.max_tokens, f"max_completion_tokens says {explicit}; give one"
        )
    if explicit == 0:
        raise invalid_value(field, 0, "must be at least 1")
    if explicit is None:
        return engine.max_tokens_for(len(prompt.tokens), output.num_candidates)
    _check_room(explicit, field, prompt, output, engine)
    return explicit


def sampling_params(
    body: GenerationBody,
    output: OutputOptions,
    beams: BeamParams | None,
    max_tokens: int,
    engine: Engine,
    grammar: str = "",
    defaults: Mapping[str, Any] = _NO_DEFAULTS,
) -> SamplingParams:
    """The engine's part of the request.

    Args:
        defaults: the model's, for parameters that the body leaves out.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_value("min_tokens", min_tokens, f"at most {max_tokens} will be generated")
    values = {name: each.value(getattr(body, name)) for name, each in PARAMETERS.items()}
    if beams is None:
        values |= {n: value for n, value in defaults.items() if getattr(body, n) is None}
    _check_vocabulary("stop_token_ids", values["stop_token_ids"], engine)
    _check_biases(body, engine)
    if beams is not None:
        values |= _NEUTRAL_IN_SEARCHES
    if values["seed"] is None:
        values["seed"] = secrets.randbits(_SEED_BITS)
    return SamplingParams(
        max_tokens=max_tokens,
        num_logprobs=0 if output.is_ranked and output.num_logprobs is None else output.num_logprobs,
        num_prompt_logprobs=_most(
            output.num_prompt_logprobs, output.num_logprobs if output.echo else None
        ),
        beams=beams,
        grammar=grammar,
        **values,
    )


def check_goes_with_structure(body: GenerationBody, path: str, engine: Engine) -> None:
    """Refuse what would let a text go on behind the end of its structure, or end it before.

    Args:
        path: of the field that asks for structured output.

    Raises:
        ApiError: 400.
    """
    if not engine.model.takes_grammars:
        raise invalid(path, f"{path}: the worker of this model has no structured output")
    if body.ignore_eos:
        raise invalid_value("ignore_eos", True, f"not with {path}: its text has an end")
    if body.min_tokens:
        raise invalid_value("min_tokens", body.min_tokens, f"not with {path}: its text has an end")


def check_prompt(prompt: Prompt, output: OutputOptions, engine: Engine) -> None:
    """Refuse token ids outside the vocabulary, and prompts that leave no room for an answer.

    Raises:
        ApiError: 400.
    """
    if not prompt.tokens:
        raise invalid(prompt.path, f"{prompt.path}: the prompt is empty, and the model has no bos")
    length, num_computed = len(prompt.tokens), len(prompt.engine_tokens)
    _check_vocabulary(prompt.path, prompt.tokens, engine)
    if num_computed >= engine.model.max_model_len:
        raise too_long(
            f"the prompt has {length} tokens; the model's context is "
            f"{engine.model.max_model_len} tokens, prompt and output together",
            prompt.path,
        )
    if engine.max_tokens_for(num_computed, 1) < 1:
        raise too_long(
            f"the prompt has {length} tokens; the whole KV cache holds {engine.pool_tokens}, "
            "prompt and output together",
            prompt.path,
        )
    field = "best_of" if output.is_ranked else "n"
    if output.num_candidates > engine.max_num_sequences:
        raise invalid_value(
            field, output.num_candidates, f"at most {engine.max_num_sequences} choices run at once"
        )
    if engine.max_tokens_for(num_computed, output.num_candidates) < 1:
        raise too_long(
            f"the prompt has {length} tokens and {field} is {output.num_candidates}; "
            + _blocks(prompt, 1, output, engine),
            field,
        )


def _check_room(
    max_tokens: int, field: str, prompt: Prompt, output: OutputOptions, engine: Engine
) -> None:
    length, context = len(prompt.tokens), engine.model.max_model_len
    given = f"the prompt has {length} tokens and {field} is {max_tokens}"
    if length + max_tokens > context:
        raise too_long(
            f"{given}, together {length + max_tokens}; the model's context is {context} tokens",
            field,
        )
    needed = engine.blocks_needed(length, max_tokens, output.num_candidates)
    if needed > engine.kv.num_blocks:
        raise too_long(f"{given}; {_blocks(prompt, max_tokens, output, engine)}", field)


def _blocks(prompt: Prompt, max_tokens: int, output: OutputOptions, engine: Engine) -> str:
    """Text: the KV blocks that a request needs, and all there are."""
    num_candidates = output.num_candidates
    needed = engine.blocks_needed(len(prompt.tokens), max_tokens, num_candidates)
    whose = "it needs" if num_candidates == 1 else f"{num_candidates} choices need"
    return (
        f"{whose} {needed} blocks of {engine.kv.block_size} tokens, "
        f"the whole KV cache has {engine.kv.num_blocks}"
    )


def _check_vocabulary(path: str, tokens: list[int] | tuple[int, ...], engine: Engine) -> None:
    size = engine.model.vocab_size
    if tokens and max(tokens) >= size:
        index = next(index for index, token in enumerate(tokens) if token >= size)
        raise invalid_value(
            f"{path}[{index}]", tokens[index], f"the vocabulary has the tokens 0 to {size - 1}"
        )


def _check_biases(body: GenerationBody, engine: Engine) -> None:
    size = engine.model.vocab_size
    for token, bias in (body.logit_bias or {}).items():
        if int(token) >= size:
            reason = f"the vocabulary has the tokens 0 to {size - 1}"
            raise invalid_value(f"logit_bias.{token}", bias, reason)


def _most(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
