"""Endpoints that generate nothing: models, tokens, health, metrics."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.answer_schema import (
    Alive,
    ErrorAnswer,
    ModelCard,
    ModelList,
    NotReady,
    PrefixList,
    Ready,
    TextAnswer,
    TokensAnswer,
    VersionAnswer,
)
from gateway.call import read_body
from gateway.engine import Engine
from gateway.errors import MISSING_FIELD, ApiError, invalid_value, unknown_model
from gateway.health import readiness, status_alone
from gateway.openapi import answers, plain_text, takes
from gateway.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody, parse_body
from gateway.service import Service
from shared.messages.leases import PrefixState
from shared.metrics import CONTENT_TYPE


def inspection_router(service: Service, version: str) -> APIRouter:
    """The endpoints that look at the model and at the gateway."""
    router = APIRouter(default_response_class=Response)
    _add_model(router, service)
    _add_tokens(router, service)
    _add_gateway(router, service, version)
    return router


def _add_model(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", tags=["model"], responses=answers(ModelList))
    async def list_models() -> Response:
        """The one model that is served here."""
        return JSONResponse({"object": "list", "data": [_model_card(service)]})

    @router.get("/v1/models/{model_id:path}", tags=["model"], responses=answers(ModelCard, 404))
    async def retrieve_model(model_id: str) -> Response:
        """One model."""
        if model_id != service.model_name:
            raise unknown_model(model_id)
        return JSONResponse(_model_card(service))

    @router.get("/prefixes", tags=["model"], responses=answers(PrefixList))
    async def list_prefixes() -> Response:
        """The prefixes that this gateway wants to stay in the KV cache, and what became of each."""
        return JSONResponse({"object": "list", "data": _prefix_cards(service)})


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post(
        "/tokenize",
        tags=["tokens"],
        openapi_extra=takes(TokenizeTextBody, TokenizeChatBody),
        responses=answers(TokensAnswer, 404, has_body=True),
    )
    async def tokenize(request: Request) -> Response:
        """Tokens of a text or of a conversation."""
        data = await read_body(request, service.max_body_bytes)
        return JSONResponse(await _tokenize(service, data))

    @router.post(
        "/detokenize",
        tags=["tokens"],
        openapi_extra=takes(DetokenizeBody),
        responses=answers(TextAnswer, 404, has_body=True),
    )
    async def detokenize(request: Request) -> Response:
        """Text of tokens, special tokens included."""
        body = parse_body(DetokenizeBody, await read_body(request, service.max_body_bytes))
        service.check_model(body.model)
        size = service.tokenizer.size
        if body.tokens and max(body.tokens) >= size:
            index = next(index for index, token in enumerate(body.tokens) if token >= size)
            reason = f"the tokenizer has the tokens 0 to {size - 1}"
            raise invalid_value(f"tokens[{index}]", body.tokens[index], reason)
        return JSONResponse({"prompt": await service.prompts.text(body.tokens, skip_special=False)})


def _add_gateway(router: APIRouter, service: Service, version: str) -> None:
    @router.get("/version", tags=["gateway"], responses=answers(VersionAnswer))
    async def show_version() -> Response:
        """Version of PageStream."""
        return JSONResponse({"version": version})

    # Whoever only wants the status asks with HEAD.
    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", tags=["gateway"], responses=answers(Alive))
    async def live() -> Response:
        """200 as long as the process works at all."""
        return JSONResponse({"status": "alive"})

    @router.head("/health", include_in_schema=False)
    @router.get("/health", tags=["gateway"], responses=answers(None, unready=None))
    async def health() -> Response:
        """As /health/ready, without a body, for clients of vLLM."""
        return status_alone(readiness(service))

    @router.head("/health/ready", include_in_schema=False)
    @router.get(
        "/health/ready",
        tags=["gateway"],
        responses=answers(Ready, unready=NotReady | ErrorAnswer),
    )
    async def ready() -> Response:
        """200 if a request sent now would be served, else the check that failed."""
        return readiness(service)

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", tags=["gateway"], responses=plain_text(CONTENT_TYPE))
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)


async def _tokenize(service: Service, data: bytes) -> dict[str, Any]:
    body = _tokenize_body(data)
    if isinstance(body, TokenizeChatBody):
        service.check_model(body.model)
        generation_prompt = body.add_generation_prompt is not False
        tokens = await service.prompts.chat_tokens(body.messages, body.tools, generation_prompt)
    else:
        service.check_model(body.model)
        special = body.add_special_tokens is not False
        tokens = await service.prompts.text_tokens(body.prompt, special)
    engine = service.engine.status
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": engine.model.max_model_len if isinstance(engine, Engine) else None,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = await service.prompts.token_strs(tokens)
    return answer


def _tokenize_body(data: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """A conversation, or a text where there are no messages."""
    try:
        return parse_body(TokenizeChatBody, data)
    except ApiError as error:
        if (error.param, error.code) != ("messages", MISSING_FIELD):
            raise
    return parse_body(TokenizeTextBody, data)


def _prefix_cards(service: Service) -> list[dict[str, Any]]:
    pinning = service.engine.pinning
    is_ready = isinstance(service.engine.status, Engine)
    return [
        {
            "id": prefix.prefix_id,
            "object": "prefix",
            "name": prefix.name,
            "num_tokens": len(prefix.tokens),
            "state": pinning.state_of(prefix) if is_ready else PrefixState.PENDING,
        }
        for prefix in pinning.prefixes
    ]


def _model_card(service: Service) -> dict[str, Any]:
    engine = service.engine.status
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagestream",
        "root": service.model_root,
        "parent": None,
        "max_model_len": engine.model.max_model_len if isinstance(engine, Engine) else None,
        "permission": [],
    }
