"""POST /v1/completions and /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.admission import (
    Output,
    Prompt,
    chat_max_tokens,
    chat_output,
    check_prompt,
    completion_max_tokens,
    completion_output,
    sampling_params,
)
from gateway.answers import stream_answer, whole_answer
from gateway.beams import beam_params
from gateway.call import Call, call_of, read_body
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.openapi import takes
from gateway.pending import Planned
from gateway.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from gateway.service import Service
from gateway.wire import AnswerHead, ChatWire, CompletionWire, Wire
from shared.sampling import SamplingParams


def generate_router(service: Service) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter(tags=["generate"])

    @router.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        with _counting(service):
            return await _complete(service, request)

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer in a conversation."""
        with _counting(service):
            return await _chat(service, request)

    return router


@contextmanager
def _counting(service: Service) -> Iterator[None]:
    """Count what is refused."""
    try:
        yield
    except ApiError as error:
        if error.rejection is not None:
            service.metrics.admission_rejections[error.rejection].inc()
        raise


async def _complete(service: Service, request: Request) -> Response:
    body = parse_body(CompletionBody, await read_body(request, service.max_body_bytes))
    service.check_model(body.model)
    beams = beam_params(body)
    output = completion_output(body)
    engine = service.ready_engine()
    planned = []
    for prompt in await service.prompts.completion(body):
        check_prompt(prompt, output, engine)
        max_tokens = completion_max_tokens(body, prompt, output, engine)
        sampling = sampling_params(body, output, beams, max_tokens, engine)
        planned.append(_planned(request, body, prompt, sampling, continues=True))
    call = call_of(request)
    head = _head(service, body, f"cmpl-{call.id}", planned, output)
    wire = CompletionWire(head, service.tokenizer)
    return await _answer(service, request, body, planned, output, wire)


async def _chat(service: Service, request: Request) -> Response:
    body = parse_body(ChatBody, await read_body(request, service.max_body_bytes))
    service.check_model(body.model)
    beams = beam_params(body)
    output = chat_output(body)
    engine = service.ready_engine()
    prompt = await service.prompts.chat(body.messages)
    check_prompt(prompt, output, engine)
    max_tokens = chat_max_tokens(body, prompt, output, engine)
    sampling = sampling_params(body, output, beams, max_tokens, engine)
    planned = [_planned(request, body, prompt, sampling, continues=False)]
    call = call_of(request)
    head = _head(service, body, f"chatcmpl-{call.id}", planned, output)
    wire = ChatWire(head, service.tokenizer)
    return await _answer(service, request, body, planned, output, wire)


async def _answer(
    service: Service,
    request: Request,
    body: GenerationBody,
    planned: Sequence[Planned],
    output: Output,
    wire: Wire,
) -> Response:
    call: Call = call_of(request)
    generation = Generation(
        service.engine,
        service.tokenizer,
        service.metrics,
        call.id,
        planned,
        output,
        call.started_s,
    )
    call.fields["stream"] = bool(body.stream)
    service.ready_engine()  # much may have happened while a long prompt was tokenized
    await generation.submit()
    if body.stream:
        return await stream_answer(generation, wire, _include_usage(body), call, request.receive)
    return await whole_answer(generation, wire, call, request.receive)


def _planned(
    request: Request,
    body: GenerationBody,
    prompt: Prompt,
    sampling: SamplingParams,
    continues: bool,
) -> Planned:
    call = call_of(request)
    return Planned(
        prompt,
        sampling,
        continues,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        tenant=call.tenant,
        deadline_ms=0 if body.deadline_ms is None else call.received_ms + body.deadline_ms,
    )


def _head(
    service: Service,
    body: GenerationBody,
    answer_id: str,
    planned: Sequence[Planned],
    output: Output,
) -> AnswerHead:
    return AnswerHead(
        id=answer_id,
        model=service.model_name,
        include_usage=_include_usage(body),
        token_ids=bool(body.return_token_ids),
        prompt_tokens=[item.prompt.tokens for item in planned for _ in range(output.num_choices)],
    )


def _include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
