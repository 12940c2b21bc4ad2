"""Endpoints that generate no text: models, tokens, health, metrics."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, overload

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.engine.readiness import readiness, status_alone
from gateway.http.call import caller_of
from gateway.http.errors import MISSING_FIELD, ApiError, invalid_value
from gateway.http.long_responses import PiecewiseJson, items, members, text, value
from gateway.models.served_model import ServedModel
from gateway.openai.endpoints.openapi_description import answers, plain_text, takes
from gateway.openai.requests.schema import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    parse_body,
)
from gateway.openai.requests.template_fields import template_options
from gateway.openai.responses.schema import (
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
from gateway.prompts.tokenization import TokenizeOptions
from gateway.service import Service
from gateway.text.tokenizer import Tokenizer
from shared.messages.leases import PrefixState
from shared.metrics import CONTENT_TYPE

_WHOLE_TOKENS = 4096
_WHOLE_CHARS = 64 * 2**10


def inspection_router(service: Service, version: str) -> APIRouter:
    """The endpoints for the model, tokens, and the state of the gateway."""
    router = APIRouter(default_response_class=Response)
    _add_model(router, service)
    _add_tokens(router, service)
    _add_gateway(router, service, version)
    return router


def _add_model(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", tags=["model"], responses=answers(ModelList))
    async def list_models() -> Response:
        """The models that are served here; in a fleet, all those of its engines."""
        cards = [_model_card(model) for model in service.models.served]
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}", tags=["model"], responses=answers(ModelCard, 404))
    async def retrieve_model(model_id: str) -> Response:
        """One model."""
        return JSONResponse(_model_card(service.models.named(model_id)))

    @router.get("/prefixes", tags=["model"], responses=answers(PrefixList))
    async def list_prefixes() -> Response:
        """The prefixes that this gateway pins in the KV cache, and the state of each."""
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
        return await _tokenize(service, request)

    @router.post(
        "/detokenize",
        tags=["tokens"],
        openapi_extra=takes(DetokenizeBody),
        responses=answers(TextAnswer, 404, has_body=True),
    )
    async def detokenize(request: Request) -> Response:
        """Text of tokens, special tokens included."""
        parse = partial(parse_body, DetokenizeBody)
        body = await service.bodies.read(request, parse, service.max_token_bytes)
        model = service.models.named(body.model)
        size = model.tokenizer.size
        if body.tokens and max(body.tokens) >= size:
            index = next(index for index, token in enumerate(body.tokens) if token >= size)
            reason = f"the tokenizer has the tokens 0 to {size - 1}"
            raise invalid_value(f"tokens[{index}]", body.tokens[index], reason)
        options = TokenizeOptions(caller_of(request))
        found = await model.prompts.text(body.tokens, skip_special=False, options=options)
        if len(found) <= _WHOLE_CHARS:
            return JSONResponse({"prompt": found})
        return PiecewiseJson(members(("prompt", text(found))))


def _add_gateway(router: APIRouter, service: Service, version: str) -> None:
    @router.get("/version", tags=["gateway"], responses=answers(VersionAnswer))
    async def show_version() -> Response:
        """Version of PageStream."""
        return JSONResponse({"version": version})

    # Probes that only want the status use HEAD.
    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", tags=["gateway"], responses=answers(Alive))
    async def live() -> Response:
        """200 while the process runs."""
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


async def _tokenize(service: Service, request: Request) -> Response:
    body = await service.bodies.read(request, _tokenize_body, service.max_token_bytes)
    model = service.models.named(body.model)
    options = TokenizeOptions(caller_of(request))
    if isinstance(body, TokenizeChatBody):
        template = template_options(body, model.tokenizer)
        tokens = await model.prompts.chat_tokens(body.messages, body.tools, options, template)
    else:
        special = body.add_special_tokens is not False
        tokens = await model.prompts.text_tokens(body.prompt, special, options)
    engine = model.ready
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": None if engine is None else engine.model.max_model_len,
    }
    # Kept as an array: a slow client may leave the answer in memory for long.
    numbers = array("i", tokens)
    spelled = _Spelled(model.tokenizer, numbers)
    if len(tokens) <= _WHOLE_TOKENS:
        shown = {"token_strs": list(spelled)} if body.return_token_strs else {}
        return JSONResponse({**answer, "tokens": tokens, **shown})
    pieces = [(name, value(given)) for name, given in answer.items()]
    pieces.append(("tokens", items(numbers)))
    if body.return_token_strs:
        pieces.append(("token_strs", items(spelled)))
    return PiecewiseJson(members(*pieces))


class _Spelled(Sequence[str]):
    """The text of each token by itself, made when it is read."""

    def __init__(self, tokenizer: Tokenizer, tokens: "array[int]") -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._spell(token) for token in self._tokens[index]]
        return self._spell(self._tokens[index])

    def _spell(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


def _tokenize_body(data: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """Parses a conversation, or a text if the body has no messages."""
    try:
        return parse_body(TokenizeChatBody, data)
    except ApiError as error:
        if (error.param, error.code) != ("messages", MISSING_FIELD):
            raise
    return parse_body(TokenizeTextBody, data)


def _prefix_cards(service: Service) -> list[dict[str, Any]]:
    return [
        {
            "id": prefix.prefix_id,
            "object": "prefix",
            "model": model.name,
            "name": prefix.name,
            "num_tokens": len(prefix.tokens),
            "state": PrefixState.PENDING if model.ready is None else pinning.state_of(prefix),
        }
        for model in service.models.served
        for pinning in [model.engine.pinning]
        for prefix in pinning.prefixes
    ]


def _model_card(model: ServedModel) -> dict[str, Any]:
    engine = model.ready
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagestream",
        "root": model.root,
        "parent": None,
        "ready": engine is not None,
        "num_engines": model.engine.num_engines,
        "max_model_len": None if engine is None else engine.model.max_model_len,
        "default_sampling_params": dict(model.defaults),
        "permission": [],
    }
