"""GET /ui/past...: an engine as it was, why, and what if.

``/ui/past`` is the span of time that the logs have; ``/ui/past/stretch`` a stretch of it, as a
snapshot with frames; ``/ui/past/explain`` the life of a request; ``/ui/past/rerun`` the requests of
a stretch once more, with other settings. A process of its own works them out.

``/ui/past/recordings`` lists recordings; with ``recording=NAME`` span, stretch and rerun are those
of one.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.http.call import call_of
from gateway.http.errors import ApiError, bus_errors, invalid_value, shutting_down
from gateway.service import Service
from gateway.ui.feed_api import HEADERS, Feeds
from gateway.ui.past_child import PastChild
from gateway.ui.past_logs import PastLogs
from gateway.ui.past_recordings import Recordings

_LONGEST_MS = 120_000  # of a stretch
_KINDS = ("recompute", "swap", "auto")
_MOST_BLOCKS = 10_000_000


def past_router(service: Service, feeds: Feeds, recordings: Recordings) -> APIRouter:
    """The endpoints of the time machine."""
    router = APIRouter(include_in_schema=False)
    child = PastChild()

    def logs_of(request: Request) -> PastLogs:
        if service.draining:
            raise shutting_down(accepted=False)
        engine_id, bus = feeds.engine(request.query_params.get("engine"))
        return PastLogs(bus, engine_id)

    async def ask(name: str, source: dict[str, Any], **more: Any) -> dict[str, Any]:
        numbers = feeds.numbers
        question = {"name": name, "numbers": numbers.known, **source, **more}
        return await child.ask(question | {"next": numbers.next_elsewhere})

    async def recording_of(request: Request) -> str | None:
        """The path of the recording that a call names."""
        if service.draining:
            raise shutting_down(accepted=False)
        name = request.query_params.get("recording")
        return None if name is None else await asyncio.to_thread(recordings.path_of, name)

    async def stretch_of(request: Request, since_ms: int, until_ms: int) -> dict[str, Any]:
        """Where the process finds a stretch: entries of the logs, or a recording."""
        if (path := await recording_of(request)) is not None:
            return {"recording": path}
        logs = logs_of(request)
        with bus_errors():
            return {"logs": await logs.stretch(since_ms, until_ms)}

    @router.get("/ui/past/recordings")
    async def list_recordings() -> Response:
        if service.draining:
            raise shutting_down(accepted=False)
        files = await asyncio.to_thread(recordings.files)
        paths = [found.path for found in files]
        spans = await ask("spans", {"recordings": paths}) if paths else {}
        return JSONResponse([found.row(spans.get(found.path)) for found in files], headers=HEADERS)

    @router.get("/ui/past")
    async def show_span(request: Request) -> Response:
        if (path := await recording_of(request)) is not None:
            return _answer(await ask("span", {"recording": path}))
        logs = logs_of(request)
        with bus_errors():
            span = await logs.span()
        return _answer({"first_ms": span[0], "last_ms": span[1]} if span else {})

    @router.get("/ui/past/stretch")
    async def show_stretch(request: Request) -> Response:
        since_ms, until_ms = _span(request)
        source = await stretch_of(request, since_ms, until_ms)
        found = await ask("stretch", source, since_ms=since_ms, until_ms=until_ms)
        tenant = call_of(request).tenant
        for number, request_id, owner in found["names"]:
            feeds.numbers.learn(request_id, number)
            if "logs" in source:  # a recording must not give a request of the logs another owner
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
        more = {"request_id": request_id, "block_size": block_size}
        return _answer(await ask("explain", {"logs": entries}, **more))

    @router.get("/ui/past/rerun")
    async def rerun_stretch(request: Request) -> Response:
        since_ms, until_ms = _span(request)
        more = {"since_ms": since_ms, "until_ms": until_ms, "changes": _changes(request)}
        source = await stretch_of(request, since_ms, until_ms)
        return _answer(await ask("rerun", source, **more))

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
