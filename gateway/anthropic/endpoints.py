"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.anthropic.answer_schema import CountAnswer, MessageAnswer, MessagesError
from gateway.anthropic.body import CountBody, MessagesBody, parse_messages_body
from gateway.anthropic.chat_request import NAMES, chat_body
from gateway.anthropic.serializer import MessageSerializer
from gateway.http.call import call_of, caller_of, client_of
from gateway.openai.endpoints.openapi_description import answers, generates, takes
from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import prepare_chat
from gateway.openai.generation.token_feed import TokenFeed
from gateway.openai.requests.template_fields import template_options
from gateway.openai.requests.tool_parameters import answer_options
from gateway.openai.requests.validation import priority_of
from gateway.openai.responses.answers import answer
from gateway.prompts.tokenization import TokenizeOptions
from gateway.service import Service


def messages_router(service: Service) -> APIRouter:
    """The endpoints of the Messages API."""
    router = APIRouter(tags=["messages"], default_response_class=Response)

    @router.post(
        "/v1/messages",
        openapi_extra=takes(MessagesBody),
        responses=_with_own_errors(generates(MessageAnswer)),
    )
    async def create_message(request: Request) -> Response:
        """The assistant's next message, in one piece or as a stream."""
        with service.counting_refusals():
            return await _create(service, request)

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=takes(CountBody),
        responses=_with_own_errors(answers(CountAnswer, 404, has_body=True)),
    )
    async def count_tokens(request: Request) -> Response:
        """Number of tokens of the prompt that a message would have."""
        with service.counting_refusals():
            return await _count(service, request)

    return router


async def _create(service: Service, request: Request) -> Response:
    body = await service.bodies.read(request, partial(parse_messages_body, MessagesBody))
    model = service.models.named(body.model)
    chat = chat_body(body)
    call = call_of(request)
    priority = priority_of(chat.priority, call.priorities, service.keys.open_priorities)
    origin = Origin(call, caller_of(request), client_of(request), None, priority, request.receive)
    with NAMES.used():
        prepared = await prepare_chat(service, origin, chat)
        [asked] = prepared.generation.output.requests
        serializer = MessageSerializer(TokenFeed(model, asked.submit), call.id)
        return await answer(service, origin, prepared, serializer)


async def _count(service: Service, request: Request) -> Response:
    limit = service.max_token_bytes
    parse = partial(parse_messages_body, CountBody)
    body = await service.bodies.read(request, parse, limit)
    model = service.models.named(body.model)
    chat = chat_body(body)
    with NAMES.used():
        answer_options(chat, model.answers)  # refuses tools that the template does not describe
        tokens = await model.prompts.chat_tokens(
            chat.messages,
            chat.tools,
            TokenizeOptions(caller_of(request)),
            template_options(chat, model.tokenizer),
        )
    return JSONResponse({"input_tokens": len(tokens)})


def _with_own_errors(described: dict[int | str, Any]) -> dict[int | str, Any]:
    """``responses`` of an endpoint, with errors in Anthropic's format."""
    return {
        status: found if status == 200 else found | {"model": MessagesError}
        for status, found in described.items()
    }
