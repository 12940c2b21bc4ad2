"""Clients, and the calls by which gateways serve them.

A call runs in its gateway's process and does with EngineClient what a Generation does, without
text. A client is no service's process: it is what must never see a token lost, repeated or changed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from secrets import token_hex

from gateway.engine.client import EngineClient
from gateway.engine.engine_status import Engine
from gateway.engine.event_queue import CallEvent, ClientDisconnected, EventQueue
from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    EngineUnreachable,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.resume.client_view import client_views
from shared.messages.endings import FinishReason
from shared.messages.requests import Stop, Submit


class Outcome(Enum):
    """How a call ended."""

    DONE = auto()
    UNAVAILABLE = auto()  # 503: nothing was accepted, as far as the gateway can see
    LOST = auto()  # the stream cannot be continued
    FAILED = auto()  # the engine reports that the request has failed
    TAKEN_OVER = auto()
    REFUSED = auto()  # 429: too much is waiting


@dataclass(slots=True)
class Event:
    """What a call sends: new tokens of a choice, its end, or the end of everything."""

    choice: int = 0
    tokens: Sequence[int] = ()
    scores: Sequence[float] = ()  # log-probabilities of the tokens, if they were asked for
    finish_reason: str = ""
    outcome: Outcome | None = None
    why: str = ""


@dataclass(slots=True)
class Stream:
    """A connection between a client and a call."""

    queue: EventQueue
    events: list[Event] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_broken: bool = False
    is_accepted: bool = False

    def send(self, event: Event) -> None:
        """To the reader, if there is one."""
        if not self.is_broken:
            self.events.append(event)
            self.arrived.set()

    def break_off(self, num_kept: int | None = None) -> None:
        """The connection is reset; of what was sent, so many events still arrive."""
        self.is_broken = True
        if num_kept is not None:
            del self.events[num_kept:]
        self.arrived.set()


class _Over(Exception):
    def __init__(self, outcome: Outcome, why: str = "") -> None:
        super().__init__(why)
        self.outcome = outcome
        self.why = why


class Call:
    """One call in a gateway's process.

    Args:
        stop_after: tokens of a choice after which it finds a stop string; None: never.
        has: tokens that the client has of each choice, and whether it has seen the end of it.
    """

    def __init__(
        self,
        engine: EngineClient,
        stream: Stream,
        submit: Submit,
        stop_after: int | None,
        has: Sequence[tuple[Sequence[int], str]] = (),
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._queue = stream.queue
        self._submit = submit
        self._stop_after = stop_after
        self._replay = [list(tokens) for tokens, _ in has]
        self._counts = [0] * submit.num_choices
        self._ended = [bool(reason) for _, reason in has] or [False] * submit.num_choices
        self._waiting: list[CallEvent] = []
        self._keeps = False

    async def serve(self, begin: str) -> None:
        """From the first byte to the last.

        Args:
            begin: "submit", "join" or "resume".
        """
        try:
            if not isinstance(self._engine.status, Engine):
                raise _Over(Outcome.UNAVAILABLE, "no engine")
            if begin == "resume":
                await self._resume()
            else:
                await self._begin(begin)
            self._stream.is_accepted = True
            while not all(self._ended):
                events, self._waiting = self._waiting, []
                for event in events or await self._queue.take():
                    self._open(event)
            self._close(abort=False)
            self._stream.send(Event(outcome=Outcome.DONE))
        except _Over as over:
            self._close(abort=not self._keeps)
            self._stream.send(Event(outcome=over.outcome, why=over.why))

    async def _begin(self, begin: str) -> None:
        submit = replace(self._submit, gateway=self._engine.instance, attachment=token_hex(8))
        if begin == "submit":
            await self._engine.submit([submit], self._queue)
        else:
            self._engine.attach(submit, self._queue)
        is_answered = False
        while not is_answered:
            for event in await self._queue.take():
                self._waiting.append(event)
                if not is_answered:
                    if isinstance(event, (ClientDisconnected, RequestFailed)):
                        self._open(event)
                    self._refuse(event)
                    is_answered = True

    async def _resume(self) -> None:
        identity = self._submit.request_id
        self._engine.look_up(identity, self._queue)
        known: Attached | None = None
        while known is None:
            for event in await self._queue.take():
                if isinstance(event, Attached):
                    known = event
                elif isinstance(event, UnknownRequest):
                    raise _Over(Outcome.LOST, "not remembered")
                elif not isinstance(event, ClientDisconnected):
                    self._refuse(event)
        self._engine.close(identity, self._queue)
        has = list(zip(map(len, self._replay), self._ended, strict=True))
        views = client_views(known, has)
        for choice, view in enumerate(views):
            self._take(choice, view.tokens.tolist())
            if view.finish_reason and not self._ended[choice]:
                ended = FinishReason(view.finish_reason)
                self._waiting.append(ChoiceFinished(identity, choice, ended))
        if not all(view.finish_reason for view in views):
            is_search = known.submit.sampling.beams is not None
            self._engine.attach(known.submit, self._queue, () if is_search else views)

    def _refuse(self, event: CallEvent) -> None:
        if isinstance(event, EngineUnreachable):
            raise _Over(Outcome.UNAVAILABLE, event.why)
        if isinstance(event, Superseded):
            self._keeps = True
            raise _Over(Outcome.TAKEN_OVER)

    def _open(self, event: CallEvent) -> None:
        self._refuse(event)
        if isinstance(event, ClientDisconnected):
            raise _Over(Outcome.LOST, "the client has gone")
        if isinstance(event, RequestFailed):
            self._keeps = event.ended_in_engine
            outcome = Outcome.FAILED if event.ended_in_engine else Outcome.LOST
            outcome = Outcome.REFUSED if event.overloaded else outcome
            raise _Over(outcome, event.error)
        if isinstance(event, TokensArrived):
            if self._submit.sampling.num_logprobs is not None and not event.logprobs:
                raise _Over(Outcome.LOST, "the log-probability of a token is missing")
            new = self._take(event.choice, event.tokens)
            if new and not self._ended[event.choice]:
                first = len(event.tokens) - len(new)
                self._deliver(event.choice, new, [s.logprob for s in event.logprobs[first:]])
        elif isinstance(event, ChoiceFinished) and not self._ended[event.choice]:
            self._ended[event.choice] = True
            self._stream.send(Event(event.choice, finish_reason=event.reason))
        else:
            assert isinstance(event, (Attached, Desynchronized, ChoiceFinished)) or event, event

    def _take(self, choice: int, tokens: Sequence[int]) -> list[int]:
        """Those of the tokens that the client does not have yet."""
        if not self._replay:
            return list(tokens)
        left = self._replay[choice]
        count = min(len(left), len(tokens))
        if left[:count] != list(tokens[:count]):
            raise _Over(Outcome.LOST, "the log has another history of this request")
        del left[:count]
        self._counts[choice] += count
        return list(tokens[count:])

    def _deliver(self, choice: int, tokens: list[int], scores: list[float]) -> None:
        limit = self._stop_after
        if limit is not None and self._counts[choice] + len(tokens) >= limit:
            del tokens[limit - self._counts[choice] :]
            del scores[limit - self._counts[choice] :]
            self._stream.send(Event(choice, tokens, scores, "stop string"))
            self._counts[choice] += len(tokens)
            self._ended[choice] = True
            identity = self._submit.request_id
            self._engine.stop(Stop(identity, choice, limit), self._queue)
            if not all(self._ended):
                self._engine.close_choice(identity, choice, limit, FinishReason.STOP, self._queue)
            return
        self._counts[choice] += len(tokens)
        self._stream.send(Event(choice, tokens, scores))

    def _close(self, abort: bool) -> None:
        identity = self._submit.request_id
        if abort:
            self._engine.abort(identity, self._queue, "not finished")
        else:
            self._engine.close(identity, self._queue)


Check = Callable[[Sequence[int], int], str]
"""(tokens before, token) -> what is wrong with it, or nothing."""
