"""From a body to a generation that the engine can be asked for."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gateway.answers.options import AnswerOptions
from gateway.engine.engine_status import Engine
from gateway.grammars.constraints import Structure
from gateway.http.call import Call
from gateway.http.errors import other_body
from gateway.models.model_table import ModelTable
from gateway.models.served_model import ServedModel
from gateway.openai.generation.generation import Generation
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.openai.generation.origin import Origin
from gateway.openai.requests.beam_parameters import beam_params
from gateway.openai.requests.output_options import OutputOptions, chat_output, completion_output
from gateway.openai.requests.schema import ChatBody, CompletionBody, GenerationBody
from gateway.openai.requests.structured_output import constraint_of
from gateway.openai.requests.template_fields import template_options
from gateway.openai.requests.tool_parameters import (
    answer_options,
    behind_reasoning,
    chat_constraint,
)
from gateway.openai.requests.validation import (
    chat_max_tokens,
    check_goes_with_structure,
    check_num_choices,
    check_prompt,
    completion_max_tokens,
    sampling_params,
)
from gateway.openai.responses.serializer import Serializer
from gateway.prompts.prompt import Prompt
from gateway.prompts.prompt_length import sampling_of_last, scores_last, truncated
from gateway.prompts.tokenization import TokenizeOptions
from gateway.resume.stream_context import Display, fingerprint, request_id, seed_of
from gateway.resume.stream_ids import call_id_of, secret_of_key
from gateway.service import Service
from shared.messages.requests import Submit
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation that was checked, and that the engine has not been asked for.

    Attributes:
        display: how the answer is shown.
        prompts: tokens of each prompt.
        secret: makes the id of a stream that can be resumed, with the client's name.
        is_repeatable: another call may have asked for it before.
        is_stream: the answer is to be streamed.
    """

    generation: Generation
    display: Display
    prompts: Sequence[list[int]]
    secret: str
    is_repeatable: bool
    is_stream: bool
    model: ServedModel

    def serializer(self) -> Serializer:
        """Of the answer, in the format that the display names."""
        return self.display.serializer(self.model.tokenizer, self.prompts)

    async def submit(self, models: ModelTable) -> None:
        """Ask the engine for it.

        Raises:
            ApiError: 422, there is one by its name from another body.
        """
        if self.is_repeatable:
            if await models.is_of_other(self.display.call_id, self.model):
                raise other_body()
            self.generation.attach()
        else:
            await self.generation.submit()


async def prepare_completion(service: Service, origin: Origin, body: CompletionBody) -> Prepared:
    """The generation that continues one or several prompts.

    Raises:
        ApiError: the body is refused, or the engine is away.
    """
    model = service.models.named(body.model)
    beams = beam_params(body)
    output = completion_output(body)
    num_prompts = model.prompts.count(body)
    check_num_choices(num_prompts, output, bool(body.stream_resume), service.max_choices)
    engine = service.ready_engine(model)
    grammar = await _grammar(model, origin, body, num_prompts, engine, constraint_of(body))
    prompts, sampling = [], []
    options = _tokenize_options(origin, body, engine)
    for whole in await model.prompts.completion(body, options):
        prompt = truncated(whole, body, engine)
        if scores_last(prompt, output, beams, engine):
            prompt = replace(prompt, scores_last=True)
        check_prompt(prompt, output, engine)
        max_tokens = (
            1 if prompt.scores_last else completion_max_tokens(body, prompt, output, engine)
        )
        params = sampling_params(body, output, beams, max_tokens, engine, grammar, model.defaults)
        sampling.append(sampling_of_last(prompt, params) if prompt.scores_last else params)
        prompts.append(prompt)
    return _prepare(service, model, origin, body, prompts, sampling, output)


async def prepare_chat(service: Service, origin: Origin, body: ChatBody) -> Prepared:
    """The generation of the answer in a conversation.

    Raises:
        ApiError: the body is refused, or the engine is away.
    """
    model = service.models.named(body.model)
    beams = beam_params(body)
    answers = answer_options(body, model.answers)
    output = chat_output(body)
    check_num_choices(1, output, bool(body.stream_resume), service.max_choices)
    engine = service.ready_engine(model)
    found = chat_constraint(body, answers, model.answers)
    options = _tokenize_options(origin, body, engine)
    template = template_options(body, model.tokenizer)
    whole = await model.prompts.chat(body.messages, body.tools, options, template)
    prompt = truncated(whole, body, engine)
    if found is not None:
        path, structure = found
        formats, tokenizer = model.answers, model.tokenizer
        found = path, behind_reasoning(structure, body, answers, prompt, formats, tokenizer)
    grammar = await _grammar(model, origin, body, 1, engine, found)
    check_prompt(prompt, output, engine)
    max_tokens = chat_max_tokens(body, prompt, output, engine)
    sampling = sampling_params(body, output, beams, max_tokens, engine, grammar, model.defaults)
    return _prepare(service, model, origin, body, [prompt], [sampling], output, answers)


async def _grammar(
    model: ServedModel,
    origin: Origin,
    body: GenerationBody,
    num_prompts: int,
    engine: Engine,
    found: tuple[str, Structure] | None,
) -> str:
    """The grammar of the answer, compiled; "" if it may be anything.

    Args:
        found: what the answer has to look like, and the field that asks for it.

    Raises:
        ApiError: 400.
    """
    if found is None:
        return ""
    path, structure = found
    check_goes_with_structure(body, path, engine)
    return await model.grammars.compile(origin.caller, path, structure, num_prompts)


def _tokenize_options(origin: Origin, body: GenerationBody, engine: Engine) -> TokenizeOptions:
    # What is cut off may have any length.
    is_cut = body.truncate_prompt_tokens is not None
    return TokenizeOptions(origin.caller, None if is_cut else engine.model.max_model_len)


def _prepare(
    service: Service,
    model: ServedModel,
    origin: Origin,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    output: OutputOptions,
    answers: AnswerOptions | None = None,
) -> Prepared:
    call, key = origin.call, origin.key
    secret = call.id if key is None else secret_of_key(key)
    call.id = call_id_of(secret, origin.client)
    if key is not None and body.seed is None:
        sampling = [_with_seed(params, seed_of(call.id)) for params in sampling]
    display = _display(model, call, body, prompts, output, is_repeatable=key is not None)
    display = replace(display, answers=answers)
    call.fields |= {"model": model.name, "stream": bool(body.stream)}
    service.ready_engine(model)  # much may have happened while a long prompt was tokenized
    submits = _submits(service, call, body, prompts, sampling, display, origin.priority)
    result = GenerationOutput(
        model.tokenizer,
        model.metrics,
        display,
        prompts,
        submits,
        call.started_s,
        model.answers,
    )
    generation = Generation(model.engine, model.metrics, result)
    tokens = [prompt.tokens for prompt in prompts]
    return Prepared(generation, display, tokens, secret, key is not None, bool(body.stream), model)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """The same with a seed for sampling; a beam search does not sample."""
    return params if params.beams is not None else replace(params, seed=seed)


def _submits(
    service: Service,
    call: Call,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    display: Display,
    priority: int,
) -> list[Submit]:
    """The messages that ask the engine for each prompt."""
    attachment, received_ms = secrets.token_hex(8), int(time.time() * 1000)
    return [
        Submit(
            request_id=request_id(call.id, position),
            gateway=service.instance,
            attachment=attachment,
            prompt=np.asarray(prompt.engine_tokens, dtype=np.int32),
            sampling=params,
            received_ms=received_ms,
            num_choices=display.output.num_candidates,
            priority=priority,
            cache_salt=body.cache_salt or "",
            tenant=call.tenant,
            deadline_ms=0 if body.deadline_ms is None else call.received_ms + body.deadline_ms,
            display=display.packed(prompt.text, prompt.scored_token),
            traceparent="" if call.trace is None else str(call.trace),
        )
        for position, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]


def _display(
    model: ServedModel,
    call: Call,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    output: OutputOptions,
    is_repeatable: bool,
) -> Display:
    options = body.stream_options
    return Display(
        call_id=call.id,
        is_chat=isinstance(body, ChatBody),
        model=model.name,
        created=int(time.time()),
        num_prompts=len(prompts),
        prompt_text=None,
        output=output,
        include_usage=bool(options and options.include_usage),
        resumable=bool(body.stream_resume),
        fingerprint=fingerprint(body) if is_repeatable else "",
        num_prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )
