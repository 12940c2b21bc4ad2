"""Looks up requests of which only the ids are known."""

from collections.abc import Sequence

from starlette.types import Receive

from gateway.engine.engines import Engines
from gateway.engine.event_queue import CallEvent, ClientDisconnected, EventQueue, ServerStopping
from gateway.engine.events import Attached, EngineUnreachable, Superseded, UnknownRequest
from gateway.http.errors import shutting_down, taken_over, unavailable
from gateway.openai.generation.generation import ClientLeft
from gateway.openai.responses.answers import watch_disconnect


class RequestLookup:
    """Looks up requests in the engine, and takes over their delivery.

    The caller must call either ``close`` or ``abandon`` in the end.

    Args:
        receive: of the HTTP call, to notice that the client disconnects.
    """

    def __init__(self, engine: Engines, receive: Receive) -> None:
        self._engine = engine
        self._receive = receive
        self._queue = EventQueue()
        self._found: dict[str, Attached | None] = {}
        self._request_ids: list[str] = []

    async def find(self, request_ids: Sequence[str]) -> list[Attached | None]:
        """The engine's state of each of these requests; None for those that it has forgotten.

        Raises:
            ApiError: 503, the engine does not answer; 409, a newer call takes one of them over.
            ClientLeft: the client closed its connection.
        """
        for identity in request_ids:
            self._request_ids.append(identity)
            self._engine.look_up(identity, self._queue)
        async with watch_disconnect(self._receive, lambda: self._queue.put(ClientDisconnected())):
            while len(self._found) < len(self._request_ids):
                for event in await self._queue.take():
                    self._apply(event)
        return [self._found[identity] for identity in request_ids]

    def close(self) -> None:
        """Close the look-ups; a Generation delivers the requests from here on."""
        for identity in self._request_ids:
            self._engine.close(identity, self._queue)

    def abandon(self, after_s: float) -> None:
        """Close the look-ups; requests that no call delivers by then are aborted.

        The look-up has ended earlier deliveries, so the requests would run for no client.
        """
        for identity in self._request_ids:
            self._engine.abandon(identity, self._queue, after_s)

    def _apply(self, event: CallEvent) -> None:
        if isinstance(event, Attached):
            self._found[event.request_id] = event
        elif isinstance(event, UnknownRequest):
            self._found[event.request_id] = None
            self._engine.close(event.request_id, self._queue)  # there is nothing to abort
        elif isinstance(event, ClientDisconnected):
            raise ClientLeft
        elif isinstance(event, EngineUnreachable):
            raise unavailable(event.why)
        elif isinstance(event, Superseded):
            raise taken_over()
        elif isinstance(event, ServerStopping):
            raise shutting_down(accepted=False)
