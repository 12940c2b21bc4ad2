"""The life of one HTTP call's generation, from its Submits to the end of its last choice."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from gateway.engine.engines import Engines
from gateway.engine.event_queue import CallEvent, ClientDisconnected, EventQueue, ServerStopping
from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    EngineUnreachable,
    PromptInLog,
    PromptMissing,
    Released,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.http.errors import (
    STREAM_LOST,
    ApiError,
    failed,
    other_body,
    overloaded,
    shutting_down,
    taken_over,
    unavailable,
)
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.openai.generation.prompt_requests import Choice, HistoryDiffers
from gateway.resume.client_view import client_views
from gateway.resume.event_ids import Position, StreamPosition
from gateway.resume.stream_context import read_display
from gateway.text.choice_text import Delta
from shared.messages.endings import FinishReason
from shared.messages.requests import ChoiceView, Stop, Submit
from shared.metrics import ModelMetrics

_EVENTS_AT_ONCE = 256  # some 10 us each, with a few log-probabilities 50
_FAILURES = (ClientDisconnected, EngineUnreachable, RequestFailed)
_WITHOUT_OUTPUT = (RequestAccepted, Attached, Desynchronized, PromptMissing, UnknownRequest)


class ClientLeft(Exception):
    """The client closed its connection."""


class TakenOver(Exception):
    """A newer call delivers the same generation."""


class Generation:
    """Submits the requests of one call, or takes them over, and follows them to their end.

    The engine's events arrive in ``queue``; ``output`` turns them into what clients see.

    Attributes:
        server_stops: it ended because this process does.
        is_taken_over: a newer call delivers at least one of its requests.
    """

    def __init__(self, engine: Engines, metrics: ModelMetrics, output: GenerationOutput) -> None:
        self.queue = EventQueue()
        self.output = output
        self.server_stops = self.is_taken_over = False
        self._engine = engine
        self._metrics = metrics
        self._abort_reason = "not finished"
        self._pending: list[CallEvent] = []  # arrived before the answer began

    def client_disconnected(self) -> None:
        """End the generation at the next event: the client has closed its connection."""
        self.queue.put(ClientDisconnected())

    async def submit(self) -> None:
        """Send all requests to the engine."""
        submits = [request.submit for request in self.output.requests]
        self._metrics.open_streams.inc(len(submits))
        await self._engine.submit(submits, self.queue)

    @property
    def route(self) -> str:
        """In a fleet, the engine of the first request, and why; else empty."""
        return self._engine.route_of(self.output.requests[0].id)

    def attach(self) -> None:
        """Send all requests to the engine, which may have them already from another call.

        Raises:
            ApiError: 422, an open call of this process has a request by this id, and another body.
        """
        submits = [request.submit for request in self.output.requests]
        for submit in submits:
            earlier = self._engine.submit_of(submit.request_id)
            if earlier is not None and not self._has_same_body(earlier):
                raise other_body()
        self._metrics.open_streams.inc(len(submits))
        for submit in submits:
            self._engine.attach(submit, self.queue)

    def attach_behind(self, tokens: Sequence[int]) -> None:
        """Like ``attach``, for a call with one choice, of which its client has these tokens."""
        [request] = self.output.requests
        [choice] = request.choices
        self._metrics.open_streams.inc()
        self.output.resume_at(StreamPosition((Position().after(tokens),)))
        choice.skip_replayed(tokens)
        views = [ChoiceView(np.asarray(tokens, np.int32), "")] if tokens else None
        self._engine.attach(request.submit, self.queue, views)

    def resume(self, found: Sequence[Attached | None], position: StreamPosition) -> None:
        """Continue where another call stopped.

        Args:
            found: the engine's state of each request; None for a request that it has forgotten, of
                which the client has all.
            position: what the client has.

        Raises:
            ApiError: 500, the client has other tokens than the log.
        """
        output = self.output
        self._metrics.open_streams.inc(len(output.requests))
        output.resume_at(position)
        positions = iter(position.choices or [Position()] * len(output.choices))
        for request, state in zip(output.requests, found, strict=True):
            own = [next(positions) for _ in request.choices]
            if state is None:
                continue
            views = client_views(state, [(place.num_tokens, place.ended) for place in own])
            for choice, view in zip(request.choices, views, strict=True):
                if output.display.output.generate:
                    try:
                        choice.skip_replayed(view.tokens.tolist())
                    except HistoryDiffers:
                        raise self._stream_lost() from None
                if view.finish_reason and not choice.delivered:
                    reason = FinishReason(view.finish_reason)
                    self._pending.append(ChoiceFinished(request.id, choice.number, reason))
            if not all(view.finish_reason for view in views):
                is_search = state.submit.sampling.beams is not None
                self._engine.attach(state.submit, self.queue, () if is_search else views)

    async def accepted(self) -> None:
        """Wait until the engine has accepted every request; until then it may still refuse.

        Raises:
            ApiError: 429 or 500, it refused one; 503, it could not be reached; 422, it has a
                request by this id, and another body; 409, a newer call delivers it.
            ClientLeft: the client closed its connection.
        """
        unanswered = {request.id for request in self.output.requests}
        while unanswered:
            for event in await self.queue.take():
                self._pending.append(event)
                if not unanswered:
                    continue
                if isinstance(event, ServerStopping):
                    self._abort_reason = "gateway shuts down"
                    raise shutting_down(accepted=False)
                if isinstance(event, Superseded):
                    self.is_taken_over = True
                    raise taken_over()
                if isinstance(event, Attached) and not self._has_same_body(event.submit):
                    # It belongs to another call, so closing this one must not abort it.
                    for request in self.output.requests:
                        self._engine.close(request.id, self.queue)
                    raise other_body()
                if isinstance(event, _FAILURES):
                    self._apply(event)
                else:
                    unanswered.discard(event.request_id)

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What is new, with the choice's index, until all choices have finished.

        Raises:
            ApiError: the generation failed; what was shown so far is not all.
            ClientLeft: the client closed its connection.
            TakenOver: a newer call delivers the rest.
        """
        output = self.output
        num_running = output.num_undelivered
        while num_running:
            touched: dict[int, Choice] = {}
            events = self._pending or await self.queue.take()
            self._pending = events[_EVENTS_AT_ONCE:]
            for event in events[:_EVENTS_AT_ONCE]:
                choice = self._apply(event)
                if choice is not None:
                    touched[choice.index] = choice
            new = []
            for choice in touched.values():
                delta = output.take(choice)
                if delta is not None:
                    new.append((choice.index, delta))
                    if delta.finish_reason is not None:
                        num_running -= 1
                        self._close_choice(choice)
            if new:
                yield new
            if self._pending:
                await asyncio.sleep(0)  # a long backlog must not block other calls

    def close(self, abort: bool = True) -> None:
        """Close all requests; must be called after ``submit``, ``attach`` or ``resume``.

        Args:
            abort: the engine stops what still runs.
        """
        for request in self.output.requests:
            if abort and request.engine_works:
                self._engine.abort(request.id, self.queue, self._abort_reason)
            else:
                self._engine.close(request.id, self.queue)
        self._metrics.open_streams.dec(len(self.output.requests))

    def abandon(self, after_s: float) -> None:
        """Close all requests; what still runs is aborted unless another call takes it over.

        Args:
            after_s: time for another call to come.
        """
        for request in self.output.requests:
            if request.engine_works:
                self._engine.abandon(request.id, self.queue, after_s)
        self.close(abort=False)

    def _apply(self, event: CallEvent) -> Choice | None:
        """Take an event; return the choice that it changed."""
        if isinstance(event, TokensArrived):  # nearly all are
            try:
                return self.output.add_tokens(event)
            except HistoryDiffers:
                raise self._stream_lost() from None
        if isinstance(event, ClientDisconnected):
            self._abort_reason = "client disconnected"
            raise ClientLeft
        if isinstance(event, ServerStopping):
            self._abort_reason = "gateway shuts down"
            self.server_stops = True
            raise shutting_down(accepted=True, resumable=self.output.display.resumable)
        if isinstance(event, _WITHOUT_OUTPUT):
            return None
        if isinstance(event, Superseded):
            self.is_taken_over = True
            raise TakenOver
        if isinstance(event, EngineUnreachable):
            self._abort_reason = event.why
            raise unavailable(event.why)
        if isinstance(event, RequestFailed):
            self._fail(event)
            return None
        if isinstance(event, ChoiceFinished):
            return self.output.finish_choice(event)
        if not isinstance(event, Released | PromptInLog):  # never in a queue
            self.output.add_prompt_facts(event)
        return None

    def _fail(self, event: RequestFailed) -> None:
        choices = self.output.request(event.request_id).choices
        if all(choice.text.finish_reason is not None for choice in choices):
            return  # all choices ended at stop strings before the Stop reached the engine
        if event.ended_in_engine:
            for choice in choices:
                choice.engine_finished = True
        self._abort_reason = event.error
        if event.overloaded:
            raise overloaded(event.error)
        raise failed(event.error, "generation_failed" if event.ended_in_engine else STREAM_LOST)

    def _stream_lost(self) -> ApiError:
        self._abort_reason = "the log has another history"
        why = "the log has another history of this request"
        return failed(f"the stream cannot be continued: {why}", STREAM_LOST)

    def _has_same_body(self, submit: Submit) -> bool:
        """Whether a request of the engine comes from the same body as this call's."""
        display = read_display(submit.display)
        return display is not None and display.fingerprint == self.output.display.fingerprint

    def _close_choice(self, choice: Choice) -> None:
        """Stop and close a choice that is complete."""
        text = choice.text
        request = self.output.mark_delivered(choice)
        if text.stopped and not choice.engine_finished:
            stop = Stop(request.id, choice.number, text.num_tokens)
            self._engine.stop(stop, self.queue)
        if request.delivered:
            self._engine.close(request.id, self.queue)
            return
        assert text.finish_reason is not None
        self._engine.close_choice(
            request.id, choice.number, text.num_tokens, text.finish_reason, self.queue
        )
