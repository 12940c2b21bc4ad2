"""Streams the events of a response from its log, to any number of clients."""

import asyncio
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.errors import ApiError, failed, unavailable
from gateway.openai.responses.answers import watch_disconnect
from gateway.responses.events import ResponseView, encoded
from gateway.responses.output_items import Event
from gateway.responses.records import DELETED
from gateway.responses.store import ResponseStore, StoredResponse, unknown_response
from gateway.responses.views import ResponseViews
from shared.bus.api import START, EntryId
from shared.errors import BusUnavailable

_POLL_S = 0.05
_ENTRIES_AT_ONCE = 64
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ResponseStream(Response):
    """Server-Sent Events of a response until its end.

    Args:
        after: number of the last event that the client has, -1 for none.
        patience_s: how long Redis may be away.
    """

    def __init__(
        self,
        store: ResponseStore,
        views: ResponseViews,
        response_id: str,
        after: int,
        patience_s: float,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._store = store
        self._views = views
        self._id = response_id
        self._after = after
        self._patience_s = patience_s
        self._cursor: EntryId = START
        self._away_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        gone = asyncio.Event()
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with watch_disconnect(receive, gone.set):
            while not gone.is_set():
                try:
                    ended = await self._follow(send, gone)
                except BusUnavailable as error:
                    self._away_s += _POLL_S
                    if self._away_s < self._patience_s:
                        await asyncio.sleep(_POLL_S)
                        continue
                    await self._send_error(send, unavailable(str(error)))
                except ApiError as error:
                    await self._send_error(send, error)
                else:
                    if not ended:
                        continue
                break
        if not gone.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send, gone: asyncio.Event) -> bool:
        """Send events until the end (True), or until the log begins anew (False)."""
        log, stored = self._store.keys.response(self._id), StoredResponse()
        view: ResponseView | None = None
        cursor = START
        while not gone.is_set():
            entries = (await self._store.bus.read({log: cursor}, 0, _ENTRIES_AT_ONCE)).get(log, ())
            self._away_s = 0.0
            for entry in entries:
                first, began = len(stored.tokens), stored.asked
                stored.apply(entry)
                cursor = entry.id
                if stored.ended is not None and stored.ended.reason == DELETED:
                    raise unknown_response(self._id)
                if stored.asked is not began:
                    first, view = 0, None  # all of it stands in this entry
                if stored.asked is None:
                    raise unknown_response(self._id)
                if view is None:
                    view = self._views.of(stored.asked)
                    await self._send_new(send, view.begin())
                for place in range(first, len(stored.tokens)):
                    scores = stored.logprobs[place : place + 1]
                    for delta in view.feed.push(stored.tokens[place : place + 1], scores):
                        await self._send_new(send, view.add(delta))
                    if place % 256 == 255:
                        await asyncio.sleep(0)
                if stored.ended is not None:
                    await self._send_new(send, view.end(stored.ended))
                    return True
            if not entries:
                if view is None:
                    raise unknown_response(self._id)
                await asyncio.sleep(_POLL_S)
        return True

    async def _send_new(self, send: Send, events: Iterator[Event]) -> None:
        """Send those events that the client does not have."""
        body = b""
        for event in events:
            if event["sequence_number"] > self._after:
                self._after = event["sequence_number"]
                body += encoded(event)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        event = {
            "type": "error",
            "code": error.code or failed("").code,
            "message": str(error),
            "param": error.param,
            "sequence_number": self._after + 1,
        }
        await send({"type": "http.response.body", "body": encoded(event), "more_body": True})
