"""GET /ui/feed: an engine's blocks and requests as Server-Sent Events, for the page.

Events: ``snapshot`` is the whole state, ``frame`` what has changed since, ``names`` are ids of the
viewer's own requests with their numbers, ``status`` tells why there are none. The arrays are
described in docs/design/page.md.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.http.call import call_of
from gateway.http.errors import invalid_value, shutting_down, unavailable
from gateway.service import Service
from gateway.ui.engine_feed import EngineFeed
from gateway.ui.request_numbers import RequestNumbers
from gateway.ui.viewers import Viewer, Viewers
from shared.bus.api import Bus

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_MOST_OWNERS = 16_384
_PATIENCE_S = 1.0  # without an event a comment shows that the connection lives


class Feeds:
    """The feeds of all engines of a gateway."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_engine: dict[str, EngineFeed] = {}
        self._owners: OrderedDict[str, str] = OrderedDict()  # of requests that the past has shown
        self.numbers = RequestNumbers()
        self.viewers = Viewers()

    @property
    def num_readers(self) -> int:
        """Readers that run."""
        return sum(feed.is_read for feed in self._by_engine.values())

    def remember_owner(self, request_id: str, tenant: str) -> None:
        """Remember the API key of a request."""
        self._owners[request_id] = tenant
        if len(self._owners) > _MOST_OWNERS:
            self._owners.popitem(last=False)

    def owner_of(self, request_id: str, feed: EngineFeed) -> str | None:
        """The name of the API key of a request; None if it is not known."""
        view = feed.view
        if view is not None and (found := view.requests.get(request_id)) is not None:
            return found.tenant
        return self._owners.get(request_id)

    def engine(self, name: str | None) -> tuple[str, Bus]:
        """The engine with this name, or the first.

        Raises:
            ApiError: 400, it is unknown; 503, there is none.
        """
        logs = self._service.models.logs
        if not logs:
            raise unavailable("no engine was found so far")
        name = min(logs) if name is None else name
        if name not in logs:
            raise invalid_value("engine", name, f"expected one of {', '.join(sorted(logs))}")
        return name, logs[name]

    def feed(self, name: str | None) -> EngineFeed:
        """The feed of an engine.

        Raises:
            ApiError: as ``engine``.
        """
        engine_id, bus = self.engine(name)
        feed = self._by_engine.get(engine_id)
        if feed is None:
            for gone in [one for one, feed in self._by_engine.items() if not feed.is_read]:
                del self._by_engine[gone]  # engines of a fleet come and go
            feed = self._by_engine[engine_id] = EngineFeed(bus, engine_id, self.numbers.of)
        return feed


class FeedResponse(StreamingResponse):
    """Sends an engine's feed until the client leaves or the gateway shuts down.

    Args:
        tenant: name of the API key.
    """

    def __init__(self, service: Service, viewers: Viewers, feed: EngineFeed, tenant: str) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers=HEADERS)
        self._service = service
        self._viewers = viewers
        self._feed = feed
        self._viewer = Viewer(tenant)
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ApiError: 429 or 503, too many pages are open; nothing was sent.
        """
        with self._viewers.place_for(self._tenant):
            self._feed.join(self._viewer)
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._feed.leave(self._viewer)

    async def _events(self) -> AsyncIterator[bytes]:
        feed = self._feed
        while not self._service.draining:
            text = await self._viewer.next(feed.snapshot, lambda: feed.view, _PATIENCE_S)
            if text is None:
                return
            yield text


def feed_router(service: Service, feeds: Feeds) -> APIRouter:
    """The feed, and the names of engines that have one."""
    router = APIRouter(include_in_schema=False)

    @router.get("/ui/feed")
    async def follow_engine(request: Request) -> Response:
        """Follow an engine until the client leaves or the gateway shuts down."""
        if service.draining:
            raise shutting_down(accepted=False)
        feed = feeds.feed(request.query_params.get("engine"))
        return FeedResponse(service, feeds.viewers, feed, call_of(request).tenant)

    @router.get("/ui/engines")
    async def list_engines() -> list[str]:
        return sorted(service.models.logs)

    return router
