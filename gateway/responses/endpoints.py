"""POST /v1/responses, and what clients can do with a response that is kept."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.http.call import (
    MAX_KEY_CHARS,
    Call,
    call_of,
    caller_of,
    client_of,
    idempotency_key,
)
from gateway.http.errors import bus_errors, invalid, invalid_value
from gateway.http.pages import page_query, shown_page
from gateway.openai.endpoints.openapi_description import (
    answers,
    generates,
    gives_stream,
    reads_header,
    reads_query,
    takes,
)
from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import Prepared
from gateway.openai.requests.validation import priority_of
from gateway.openai.responses.answers import answer
from gateway.responses.answer_schema import DeletedAnswer, ItemsAnswer, ResponseAnswer
from gateway.responses.prepare import prepare_response
from gateway.responses.records import ResponseAsked
from gateway.responses.request.body import ResponseBody, parse_response_body
from gateway.responses.request.chat_request import NAMES
from gateway.responses.serializer import ResponseSerializer
from gateway.responses.service import Responses
from gateway.responses.store import StoredResponse, tokens_message
from gateway.service import Service
from gateway.text.choice_text import Delta
from shared.errors import BusUnavailable
from shared.logs import EventLog

_log = EventLog("gateway.responses.endpoints")
_FULL_SHARE = 0.7  # of Redis' memory, below what stops new generations
_MOST_ITEMS = 100  # on a page
_FEW_ITEMS = 20


def responses_router(service: Service, responses: Responses) -> APIRouter:
    """The endpoints of responses."""
    router = APIRouter(tags=["responses"], default_response_class=Response)
    about = "Names a response, to ask for it again."
    key = reads_header("Idempotency-Key", about, minLength=1, maxLength=MAX_KEY_CHARS)

    @router.post(
        "/v1/responses",
        openapi_extra=takes(ResponseBody) | key,
        responses=generates(ResponseAnswer),
    )
    async def create_response(request: Request) -> Response:
        """Answer an input, in one piece, as a stream, or in the background."""
        with service.counting_refusals(), bus_errors():
            return await _create(service, responses, request)

    _add_kept(router, service, responses)
    return router


def _add_kept(router: APIRouter, service: Service, responses: Responses) -> None:
    """The endpoints of responses that are kept."""
    where = reads_query(
        stream={"type": "string", "enum": ["true", "false"]},
        starting_after={"type": "integer", "minimum": 0, "maximum": 999_999_999},
    )

    @router.get(
        "/v1/responses/{response_id}",
        openapi_extra=where,
        responses=gives_stream(ResponseAnswer, 400, 404),
    )
    async def get_response(response_id: str, request: Request) -> Response:
        """A response that is kept; with ``stream=true`` its events, as they come."""
        with service.counting_refusals(), bus_errors():
            found = await responses.store.find(response_id, call_of(request).tenant)
            after = _starting_after(request)
            if after is None:
                return JSONResponse(await responses.views.object_of(found))
            return responses.stream(response_id, after)

    @router.delete("/v1/responses/{response_id}", responses=answers(DeletedAnswer, 404))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; what is still generated for it is stopped."""
        with service.counting_refusals(), bus_errors():
            found = await responses.store.find(response_id, call_of(request).tenant)
            await responses.store.delete(found)
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseAnswer, 400, 404))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a background response; what was generated until then is its answer."""
        with service.counting_refusals(), bus_errors():
            found = await responses.store.find(response_id, call_of(request).tenant)
            return JSONResponse(await _cancelled(service, responses, found))

    page = reads_query(
        order={"type": "string", "enum": ["asc", "desc"]},
        limit={"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS},
        after={"type": "string"},
    )

    @router.get(
        "/v1/responses/{response_id}/input_items",
        openapi_extra=page,
        responses=answers(ItemsAnswer, 400, 404),
    )
    async def input_items(response_id: str, request: Request) -> Response:
        """What a response was asked with."""
        with service.counting_refusals(), bus_errors():
            found = await responses.store.find(response_id, call_of(request).tenant)
            query = page_query(request, _FEW_ITEMS, _MOST_ITEMS)
            by_id = {item["id"]: item for item in await responses.views.input_of(found)}
            ids = query.behind(list(by_id))
            page = [by_id[name] for name in ids[: query.limit]]
            return JSONResponse(shown_page(page, len(ids) > len(page)))


async def _create(service: Service, responses: Responses, request: Request) -> Response:
    raw: list[bytes] = []

    def parse(data: bytes) -> ResponseBody:
        raw.append(data)
        return parse_response_body(data)

    body = await service.bodies.read(request, parse)
    service.ready_engine(service.models.named(body.model))
    call = call_of(request)
    is_kept = await _may_be_kept(service, responses, call, body, len(raw[0]))
    origin = _origin(service, request, body)
    prepared, asked = await prepare_response(service, responses, origin, body, raw[0])
    call.fields["response"] = asked.id
    if body.background:
        await responses.begin(asked)
        if body.stream:
            return responses.stream(asked.id, -1)
        return JSONResponse(await responses.views.object_of(StoredResponse(asked)))
    view = responses.views.of(asked, body)
    view.is_kept = is_kept
    serializer = ResponseSerializer(view)
    keep = _keeper(responses, asked, serializer, prepared) if is_kept else None
    with NAMES.used():
        return await answer(service, origin, prepared, serializer, keep)


async def _may_be_kept(
    service: Service, responses: Responses, call: Call, body: ResponseBody, num_bytes: int
) -> bool:
    """Whether the response will be kept: where a client did not ask for it, if there is room.

    Raises:
        ApiError: 429, there is no room, and the client asks for it.
    """
    if not body.is_kept:
        return False
    if body.background:
        responses.dispatcher.check_room(call.tenant)
    is_full = service.models.memory_share > _FULL_SHARE
    if not is_full and await responses.store.kept.has_room(call.tenant, num_bytes):
        return True
    if body.store or body.background:
        raise responses.store.no_room(is_full)
    return False


def _origin(service: Service, request: Request, body: ResponseBody) -> Origin:
    """Where a body comes from; a response in the background outlives its call.

    Raises:
        ApiError: 400, its priority or its key is refused.
    """
    call, key = call_of(request), idempotency_key(request)
    if body.background:
        key = key or secrets.token_hex(16)
        call = Call(tenant=call.tenant, priorities=call.priorities, trace=call.trace)
    priority = priority_of(body.priority, call.priorities, service.keys.open_priorities)
    return Origin(call, caller_of(request), client_of(request), key, priority, request.receive)


def _keeper(
    responses: Responses,
    asked: ResponseAsked,
    serializer: ResponseSerializer,
    prepared: Prepared,
) -> Callable[[Sequence[Delta]], Awaitable[None]]:
    """What keeps a response when all of it is generated, before its client has the end."""

    async def keep(choices: Sequence[Delta]) -> None:
        for delta in choices:
            serializer.take(delta)
        ended = serializer.ended(prepared.generation.output.cached_tokens)
        tokens = tokens_message(serializer.tokens, serializer.logprobs)
        try:
            await responses.store.keep(asked, tokens, ended)
        except BusUnavailable as error:
            _log.warning("response not kept", id=asked.id, error=error)
            serializer.view.is_kept = False

    return keep


async def _cancelled(
    service: Service, responses: Responses, found: StoredResponse
) -> dict[str, Any]:
    assert found.asked is not None
    body = parse_response_body(found.asked.body)
    if not body.background:
        reason = (
            "only a response in the background can be cancelled; close the connection of others"
        )
        raise invalid_value("response_id", found.asked.id, reason)
    if found.ended is None:
        found = await responses.store.cancel(found, service.instance)
    return await responses.views.object_of(found)


def _starting_after(request: Request) -> int | None:
    """The last event that the client has, -1 for none; None: it wants the object.

    Raises:
        ApiError: 400.
    """
    query = request.query_params
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise invalid_value("stream", stream, "must be true or false")
    after = query.get("starting_after")
    if after is None:
        return -1 if stream == "true" else None
    if stream == "false":
        raise invalid("starting_after", "starting_after: only allowed when stream is true")
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise invalid_value("starting_after", after, "must be the number of an event")
    return int(after)
