"""Asks the engine for requests of which only the ids are known."""

from collections.abc import Sequence

from starlette.types import Receive

from gateway.engine.client import EngineClient
from gateway.engine.event_queue import CallEvent, ClientDisconnected, EventQueue, ServerStopping
from gateway.engine.events import Attached, EngineUnreachable, Superseded, UnknownRequest
from gateway.http.errors import shutting_down, taken_over, unavailable
from gateway.openai.generation import ClientLeft
from gateway.openai.responses import watch_disconnect


class RequestLookup:
    """Requests that somebody wants to go on with; from here on nobody else delivers them.

    Either ``close`` or ``abandon`` must be called in the end.

    Args:
        receive: tells when the client leaves.
    """

    def __init__(self, engine: EngineClient, receive: Receive) -> None:
        self._engine = engine
        self._receive = receive
        self._queue = EventQueue()
        self._found: dict[str, Attached | None] = {}
        self._asked: list[str] = []

    async def ask(self, request_ids: Sequence[str]) -> list[Attached | None]:
        """What the engine knows of each of these requests; None for what it does not remember.

        Raises:
            ApiError: 503, the engine does not answer; 409, somebody else wants one of them.
            ClientLeft: nobody waits any more.
        """
        for identity in request_ids:
            self._asked.append(identity)
            self._engine.look_up(identity, self._queue)
        async with watch_disconnect(self._receive, lambda: self._queue.put(ClientDisconnected())):
            while len(self._found) < len(self._asked):
                for event in await self._queue.take():
                    self._open(event)
        return [self._found[identity] for identity in request_ids]

    def close(self) -> None:
        """What goes on is delivered by another call, or by whoever asked."""
        for identity in self._asked:
            self._engine.close(identity, self._queue)

    def abandon(self, after_s: float) -> None:
        """Abort after a while what nobody takes: earlier deliveries may have ended for this one."""
        for identity in self._asked:
            self._engine.abandon(identity, self._queue, after_s)

    def _open(self, event: CallEvent) -> None:
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
