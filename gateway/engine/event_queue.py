"""The queue of events that one HTTP call waits on: those of its requests and of its connection."""

import asyncio
from dataclasses import dataclass

from gateway.engine.events import Event, TokensArrived


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """The client has closed its connection."""


@dataclass(frozen=True, slots=True)
class ServerStopping:
    """This process shuts down, and the call ends with it."""


CallEvent = Event | ClientDisconnected | ServerStopping


class EventQueue:
    """Events in the order of their arrival; a slow reader takes several at once."""

    def __init__(self) -> None:
        self._events: list[CallEvent] = []
        self._last_tokens: dict[tuple[str, int], TokensArrived] = {}  # by request and choice
        self._arrived = asyncio.Event()

    def put(self, event: CallEvent) -> None:
        """Add an event without blocking: one slow client must not delay the reader of the log."""
        if not self._merge(event):
            self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[CallEvent]:
        """Wait for at least one event; return all there are."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        self._last_tokens.clear()
        return events

    def _merge(self, event: CallEvent) -> bool:
        """Append tokens to the waiting event of the same choice, if there is one.

        A slow reader's backlog is then a list of numbers a choice. Events of other choices in
        between do not matter, as the order counts within a choice only.

        Returns:
            False if the event has to wait by itself.
        """
        if not isinstance(event, TokensArrived) or event.logprobs:
            return False
        last = self._last_tokens.setdefault((event.request_id, event.choice), event)
        if last is event:
            return False
        last.tokens.extend(event.tokens)
        return True
