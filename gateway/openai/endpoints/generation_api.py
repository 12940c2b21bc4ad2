"""POST /v1/completions and /v1/chat/completions."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.http.call import MAX_KEY_CHARS, call_of, caller_of, client_of, idempotency_key
from gateway.http.errors import no_embeddings
from gateway.openai.endpoints.openapi_description import generates, reads_header, takes
from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import prepare_chat, prepare_completion
from gateway.openai.requests.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from gateway.openai.requests.validation import priority_of
from gateway.openai.responses.answers import answer
from gateway.openai.responses.schema import ChatAnswer, CompletionAnswer
from gateway.service import Service


def generate_router(service: Service) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter(tags=["generate"], default_response_class=Response)
    about = "Names a generation, to ask for it again."
    key = reads_header("Idempotency-Key", about, minLength=1, maxLength=MAX_KEY_CHARS)

    @router.post(
        "/v1/completions",
        openapi_extra=takes(CompletionBody) | key,
        responses=generates(CompletionAnswer),
    )
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        with service.counting_refusals():
            body = await service.bodies.read(request, partial(parse_body, CompletionBody))
            origin = _origin(service, request, body)
            prepared = await prepare_completion(service, origin, body)
            return await answer(service, origin, prepared)

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatBody) | key,
        responses=generates(ChatAnswer),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer in a conversation."""
        with service.counting_refusals():
            body = await service.bodies.read(request, partial(parse_body, ChatBody))
            origin = _origin(service, request, body)
            prepared = await prepare_chat(service, origin, body)
            return await answer(service, origin, prepared)

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        with service.counting_refusals():
            raise no_embeddings()

    return router


def _origin(service: Service, request: Request, body: GenerationBody) -> Origin:
    """Where a body comes from.

    Raises:
        ApiError: 400, its priority or its key is refused.
    """
    call = call_of(request)
    return Origin(
        call,
        caller_of(request),
        client_of(request),
        idempotency_key(request),
        priority_of(body.priority, call.priorities, service.keys.open_priorities),
        request.receive,
    )
