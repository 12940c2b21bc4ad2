"""GET /ui/past...: an engine as it was, why, and what if.

``/ui/past`` is the span of time that the logs have; ``/ui/past/stretch`` a stretch of it, as a
snapshot with frames; ``/ui/past/explain`` the life of a request; ``/ui/past/rerun`` the requests of
a stretch once more, with other settings. A process of its own works them out.
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.http.call import call_of
from gateway.http.errors import ApiError, bus_errors, invalid_value, shutting_down
from gateway.service import Service
from gateway.ui.feed_api import HEADERS, Feeds
from gateway.ui.past_child import PastChild
from gateway.ui.past_logs import PastLogs

_LONGEST_MS = 120_000  # of a stretch
_KINDS = ("recompute", "swap", "auto")
_MOST_BLOCKS = 10_000_000


def past_router(service: Service, feeds: Feeds) -> APIRouter:
    """The endpoints of the time machine."""
    router = APIRouter(include_in_schema=False)
    child = PastChild()

    def logs_of(request: Request) -> PastLogs:
        if service.draining:
            raise shutting_down(accepted=False)
        engine_id, bus = feeds.engine(request.query_params.get("engine"))
        return PastLogs(bus, engine_id)

    async def ask(name: str, logs: dict[str, Any], **more: Any) -> dict[str, Any]:
        numbers = feeds.numbers
        question = {"name": name, "logs": logs, "numbers": numbers.known, **more}
        return await child.ask(question | {"next": numbers.next_elsewhere})

    @router.get("/ui/past")
    async def show_span(request: Request) -> Response:
        logs = logs_of(request)
        with bus_errors():
            span = await logs.span()
        return _answer({"first_ms": span[0], "last_ms": span[1]} if span else {})

    @router.get("/ui/past/stretch")
    async def show_stretch(request: Request) -> Response:
        since_ms, until_ms = _span(request)
        logs = logs_of(request)
        with bus_errors():
            entries = await logs.stretch(since_ms, until_ms)
        found = await ask("stretch", entries, since_ms=since_ms, until_ms=until_ms)
        tenant = call_of(request).tenant
        for number, request_id, owner in found["names"]:
            feeds.numbers.learn(request_id, number)
            feeds.remember_owner(request_id, owner)
        found["names"] = [[n, name] for n, name, owner in found["names"] if owner == tenant]
        return _answer(found)

    @router.get("/ui/past/explain")
    async def explain_request(request: Request) -> Response:
        number = _number(request, "request", 1, 1 << 40)
        request_id = feeds.numbers.id_of(number)
        feed = feeds.feed(request.query_params.get("engine"))
        if request_id is None or feeds.owner_of(request_id, feed) != call_of(request).tenant:
            raise ApiError(404, f"request={number}: this key has no such request in the logs")
        logs = logs_of(request)
        with bus_errors():
            entries = await logs.everything()
        block_size = None if feed.view is None else feed.view.geometry.block_size
        return _answer(await ask("explain", entries, request_id=request_id, block_size=block_size))

    @router.get("/ui/past/rerun")
    async def rerun_stretch(request: Request) -> Response:
        since_ms, until_ms = _span(request)
        more = {"since_ms": since_ms, "until_ms": until_ms, "changes": _changes(request)}
        logs = logs_of(request)
        with bus_errors():
            entries = await logs.stretch(since_ms, until_ms)
        return _answer(await ask("rerun", entries, **more))

    return router


def _answer(found: dict[str, Any]) -> Response:
    return JSONResponse(found, headers=HEADERS)


def _span(request: Request) -> tuple[int, int]:
    """The stretch that a call names.

    Raises:
        ApiError: 400.
    """
    since_ms = _number(request, "since_ms", 0, 1 << 50)
    until_ms = _number(request, "until_ms", since_ms, 1 << 50)
    return since_ms, min(until_ms, since_ms + _LONGEST_MS)


def _changes(request: Request) -> dict[str, Any]:
    """The settings that a rerun has instead of those that there were.

    Raises:
        ApiError: 400, a value is impossible.
    """
    changes: dict[str, Any] = {}
    for name, least, most in (
        ("num_blocks", 1, _MOST_BLOCKS),
        ("num_host_blocks", 0, _MOST_BLOCKS),
        ("num_watermark_blocks", 0, _MOST_BLOCKS),
        ("max_num_sequences", 1, 100_000),
        ("max_num_batched_tokens", 1, 1_000_000),
    ):
        if name in request.query_params:
            changes[name] = _number(request, name, least, most)
    kind = request.query_params.get("preemption")
    if kind is not None:
        if kind not in _KINDS:
            raise invalid_value("preemption", kind, f"expected one of {', '.join(_KINDS)}")
        changes["preemption"] = kind
    return changes


def _number(request: Request, name: str, least: int, most: int) -> int:
    given = request.query_params.get(name, "")
    # isdecimal alone takes digits of other scripts, too, which int reads.
    if not (given.isascii() and given.isdecimal() and len(given) <= 16):
        raise invalid_value(name, given, "expected a whole number")
    value = int(given)
    if not least <= value <= most:
        raise invalid_value(name, value, f"expected {least} to {most}")
    return value
