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


class _Past:
    """Answers questions about the past of a gateway's engines."""

    def __init__(self, service: Service, feeds: Feeds, recordings: Recordings) -> None:
        self._service = service
        self._feeds = feeds
        self._recordings = recordings
        self._child = PastChild()

    async def list_recordings(self) -> Response:
        """The recordings that there are, with their spans."""
        self._check_open()
        files = await asyncio.to_thread(self._recordings.files)
        paths = [found.path for found in files]
        spans = await self._ask("spans", {"recordings": paths}) if paths else {}
        return JSONResponse([found.row(spans.get(found.path)) for found in files], headers=HEADERS)

    async def show_span(self, request: Request) -> Response:
        """First and last moment."""
        if (path := await self._recording_of(request)) is not None:
            return _answer(await self._ask("span", {"recording": path}))
        logs = self._logs_of(request)
        with bus_errors():
            span = await logs.span()
        return _answer({"first_ms": span[0], "last_ms": span[1]} if span else {})

    async def show_stretch(self, request: Request) -> Response:
        """A snapshot and frames, with the ids of the key's own requests."""
        since_ms, until_ms = _span(request)
        source = await self._stretch_of(request, since_ms, until_ms)
        found = await self._ask("stretch", source, since_ms=since_ms, until_ms=until_ms)
        tenant = call_of(request).tenant
        for number, request_id, owner in found["names"]:
            self._feeds.numbers.learn(request_id, number)
            if "logs" in source:  # a recording must not give a request of the logs another owner
                self._feeds.remember_owner(request_id, owner)
        found["names"] = [[n, name] for n, name, owner in found["names"] if owner == tenant]
        return _answer(found)

    async def explain_request(self, request: Request) -> Response:
        """The life of one of the key's own requests."""
        feeds = self._feeds
        number = _number(request, "request", 1, 1 << 40)
        request_id = feeds.numbers.id_of(number)
        feed = feeds.feed(request.query_params.get("engine"))
        if request_id is None or feeds.owner_of(request_id, feed) != call_of(request).tenant:
            raise ApiError(404, f"request={number}: this key has no such request in the logs")
        logs = self._logs_of(request)
        with bus_errors():
            entries = await logs.everything()
        block_size = None if feed.view is None else feed.view.geometry.block_size
        more = {"request_id": request_id, "block_size": block_size}
        return _answer(await self._ask("explain", {"logs": entries}, **more))

    async def rerun_stretch(self, request: Request) -> Response:
        """The curves of a stretch with the settings that there were, and with others."""
        since_ms, until_ms = _span(request)
        more = {"since_ms": since_ms, "until_ms": until_ms, "changes": _changes(request)}
        source = await self._stretch_of(request, since_ms, until_ms)
        return _answer(await self._ask("rerun", source, **more))

    async def _ask(self, name: str, source: dict[str, Any], **more: Any) -> dict[str, Any]:
        numbers = self._feeds.numbers
        question = {"name": name, "numbers": numbers.known, **source, **more}
        return await self._child.ask(question | {"next": numbers.next_elsewhere})

    async def _stretch_of(self, request: Request, since_ms: int, until_ms: int) -> dict[str, Any]:
        """Where the process finds a stretch: entries of the logs, or a recording."""
        if (path := await self._recording_of(request)) is not None:
            return {"recording": path}
        logs = self._logs_of(request)
        with bus_errors():
            return {"logs": await logs.stretch(since_ms, until_ms)}

    async def _recording_of(self, request: Request) -> str | None:
        """The path of the recording that a call names, if it names one."""
        self._check_open()
        name = request.query_params.get("recording")
        return None if name is None else await asyncio.to_thread(self._recordings.path_of, name)

    def _logs_of(self, request: Request) -> PastLogs:
        self._check_open()
        engine_id, bus = self._feeds.engine(request.query_params.get("engine"))
        return PastLogs(bus, engine_id)

    def _check_open(self) -> None:
        if self._service.draining:
            raise shutting_down(accepted=False)


def past_router(service: Service, feeds: Feeds, recordings: Recordings) -> APIRouter:
    """The endpoints of the time machine."""
    router = APIRouter(include_in_schema=False)
    past = _Past(service, feeds, recordings)
    router.get("/ui/past")(past.show_span)
    router.get("/ui/past/recordings")(past.list_recordings)
    router.get("/ui/past/stretch")(past.show_stretch)
    router.get("/ui/past/explain")(past.explain_request)
    router.get("/ui/past/rerun")(past.rerun_stretch)
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
