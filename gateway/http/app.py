"""The FastAPI application: endpoints, middleware, and handlers that turn errors into answers."""

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.authentication import OPEN_PATHS, RequireKey
from gateway.access.call_limits import LimitCalls
from gateway.anthropic.body import CountBody, MessagesBody
from gateway.anthropic.endpoints import messages_router
from gateway.batches.body import BatchBody
from gateway.batches.endpoints import batches_router
from gateway.batches.service import Batches
from gateway.files.endpoints import files_router
from gateway.http.call import AccessLog, call_of, shown_path
from gateway.http.cors import allow_origins
from gateway.http.errors import ApiError, failed
from gateway.http.other_errors import error_response
from gateway.openai.endpoints.api_docs import docs_router
from gateway.openai.endpoints.generation_api import generate_router
from gateway.openai.endpoints.inspection_api import inspection_router
from gateway.openai.endpoints.openapi_description import describe
from gateway.openai.requests.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from gateway.responses.endpoints import responses_router
from gateway.responses.request.body import ResponseBody
from gateway.responses.service import Responses
from gateway.resume.streams_api import streams_router
from gateway.service import Service
from gateway.ui.feed_api import Feeds, feed_router
from gateway.ui.page import ui_router
from gateway.ui.past_api import past_router
from gateway.ui.past_recordings import Recordings
from shared.version import version

_BODIES: list[type[BaseModel]] = [
    CompletionBody,
    ChatBody,
    ResponseBody,
    BatchBody,
    MessagesBody,
    CountBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
]


def create_app(
    service: Service,
    responses: Responses,
    batches: Batches,
    has_page: bool,
    recordings: str | None = None,
) -> FastAPI:
    """The application that serves one gateway's clients.

    Args:
        has_page: it serves the page for browsers.
        recordings: folder of the recordings that the page can open.
    """
    # Redirects would trust the Host header.
    # FastAPI's own page of the API loads scripts from other hosts, and sends no key.
    app = FastAPI(
        title="PageStream",
        version=version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(docs_router())
    if has_page:
        app.include_router(ui_router())
        feeds = Feeds(service)
        app.include_router(feed_router(service, feeds))
        app.include_router(past_router(service, feeds, Recordings(recordings)))
    app.include_router(generate_router(service))
    app.include_router(messages_router(service))
    app.include_router(streams_router(service))
    app.include_router(responses_router(service, responses))
    app.include_router(files_router(service, batches.files, batches.store.reader_of))
    app.include_router(batches_router(service, batches))
    app.include_router(inspection_router(service, version()))
    app.add_middleware(
        LimitCalls,
        quotas=service.quotas,
        is_shared=lambda: service.keys.num_tenants > 1,
        is_full=lambda: service.models.is_full,
        metrics=service.metrics,
    )
    app.add_middleware(
        RequireKey,
        keys=service.keys,
        metrics_keys=service.metrics_keys,
        metrics=service.metrics,
    )
    allow_origins(app, service.cors_origins)
    # Outermost, so that it logs calls that the others refuse.
    app.add_middleware(AccessLog, tracer=service.tracer)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_bug)

    _describe_when_asked(app, service)
    return app


def _describe_when_asked(app: FastAPI, service: Service) -> None:
    """Make the OpenAPI description when it is asked for, with the defaults of the only model."""
    described: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        served = service.models.served
        defaults = dict(served[0].defaults) if len(served) == 1 else {}
        if described.get("defaults") != defaults:
            required = service.keys.are_required
            schema = describe(app, _BODIES, required, OPEN_PATHS, defaults)
            described.update(defaults=defaults, schema=schema)
        found: dict[str, Any] = described["schema"]
        return found

    app.openapi = openapi  # type: ignore[method-assign]


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    fields = call_of(request).fields
    fields["error"] = error.code or "invalid"
    if error.param is not None:
        fields["param"] = error.param
    return error_response(request.scope, error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {shown_path(request.scope)}"
    known = {404: f"there is no {path}", 405: f"{path} is not allowed"}
    message = known.get(error.status_code, str(error.detail))
    headers = error.headers
    if error.status_code == 405:
        headers = {"Allow": ", ".join(_methods(request))}
    shown = ApiError(error.status_code, message, headers=headers)
    return error_response(request.scope, shown)


def _methods(request: Request) -> list[str]:
    """Methods that this path takes; Starlette names those of the first route alone."""
    path, found = request.scope["path"], set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found)


async def _answer_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_response(request.scope, failed("internal error", "internal_error"))
