"""One HTTP call's generation, from its Submits to the last token of its last choice."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from gateway.engine.client import EngineClient
from gateway.engine.event_queue import CallEvent, ClientDisconnected, EventQueue, ServerStopping
from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    EngineUnreachable,
    PrefixFound,
    PromptMissing,
    PromptScored,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.http.errors import (
    STREAM_LOST,
    failed,
    other_body,
    overloaded,
    shutting_down,
    taken_over,
    unavailable,
)
from gateway.openai.pending_requests import Part, PendingRequest, Planned
from gateway.openai.prompt_logprobs import PromptScores, echoed_scores, prompt_scores
from gateway.openai.serializers import Usage
from gateway.openai.validation import Output
from gateway.resume.client_view import views_of
from gateway.resume.event_ids import Position, StreamPosition
from gateway.resume.stream_context import Display, read_display, request_id
from gateway.text.choice import Choice, Delta
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Stop, Submit
from shared.metrics import GatewayMetrics

_LETTERS_AT_ONCE = 256  # some 10 us each, with a few log-probabilities 50
_BAD_NEWS = (ClientDisconnected, EngineUnreachable, RequestFailed)
_NO_NEWS = (RequestAccepted, Attached, Desynchronized, PromptMissing, UnknownRequest)


class ClientLeft(Exception):
    """The client closed its connection."""


class TakenOver(Exception):
    """A newer call delivers the same generation."""


class Generation:
    """Submits the prompts of one call, or takes them over, and follows their choices.

    Choice ``j`` of prompt ``i`` has the index ``i * num_candidates + j``.

    Args:
        display: how the answer is shown; the ids of the requests come from its call's.
        started_s: monotonic time at which the call arrived.

    Attributes:
        server_leaves: it ended because this process does.
        is_taken_over: a newer call delivers at least one of its requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        planned: Sequence[Planned],
        display: Display,
        started_s: float,
    ) -> None:
        self.queue = EventQueue()
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._display = display
        self._output: Output = display.output
        self._started_s = started_s
        self._stops = StopStrings(self._output.stops)
        self._requests = [
            self._new_request(request_id(display.call_id, position), position, item)
            for position, item in enumerate(planned)
        ]
        self._parts = [part for request in self._requests for part in request.parts]
        self._by_id = {request.request_id: request for request in self._requests}
        self._aborted_because = "not finished"
        self.server_leaves = self.is_taken_over = False
        self._waiting: list[CallEvent] = []  # came before anybody could be shown anything
        self._cached_before = 0

    @property
    def num_candidates(self) -> int:
        """Choices that are generated, for all prompts together."""
        return len(self._parts)

    def best(self) -> list[int]:
        """Indexes of the choices to show: of each prompt's the likeliest, in that order."""
        output = self._output
        if not output.is_ranked:
            return list(range(len(self._parts)))
        chosen: list[int] = []
        for request in self._requests:
            ranked = sorted(request.parts, key=lambda part: -part.choice.mean_logprob)
            chosen += [part.index for part in ranked[: output.num_choices]]
        return chosen

    @property
    def scores_prompts(self) -> bool:
        """The answer has log-probabilities of prompts, which may be thousands of tokens."""
        return self._requests[0].planned.sampling.num_prompt_logprobs is not None

    def prompt_scores(self) -> list[PromptScores]:
        """Of each prompt, if they are shown beside the texts, else nothing.

        Raises:
            ApiError: 500, the engine did not tell all of them.
        """
        num_top = self._output.num_prompt_logprobs
        if num_top is None:
            return []
        return [
            prompt_scores(request.planned.prompt.tokens, request.prompt_scores, num_top)
            for request in self._requests
        ]

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        known = sum(len(request.planned.prompt.tokens) for request in self._requests)
        return Usage(
            self._display.num_prompt_tokens or known,
            sum(request.num_generated for request in self._requests),
            self.cached_tokens,
        )

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, found in the prefix cache."""
        found = sum(request.cached_tokens for request in self._requests)
        return max(found, self._cached_before)

    @property
    def finish_reasons(self) -> str:
        """How the choices ended, for the access log."""
        reasons = (part.choice.finish_reason or FinishReason.ABORT for part in self._parts)
        return ",".join(sorted(set(reasons)))

    async def submit(self) -> None:
        """Hand everything to the engine."""
        self._metrics.open_streams.inc(len(self._requests))
        await self._engine.submit(self._submits(), self.queue)

    def join(self) -> None:
        """Hand everything to the engine, which may have it already, from another call.

        Raises:
            ApiError: 422, what another call here waits for is something else.
        """
        submits = self._submits()
        for submit in submits:
            earlier = self._engine.submit_of(submit.request_id)
            if earlier is not None and not self._is_repeated_in(earlier):
                raise other_body()
        self._metrics.open_streams.inc(len(submits))
        for submit in submits:
            self._engine.attach(submit, self.queue)

    def resume(self, found: Sequence[Attached | None], position: StreamPosition) -> None:
        """Go on where another call stopped.

        Args:
            found: what the engine knows of each request; None for what it has forgotten, of which
                the client has all.
            position: what the client has.
        """
        self._metrics.open_streams.inc(len(self._requests))
        self._cached_before = position.cached_tokens
        places = iter(position.choices or [Position()] * len(self._parts))
        for request, known in zip(self._requests, found, strict=True):
            own = [next(places) for _ in request.parts]
            if known is None:
                for part, place in zip(request.parts, own, strict=True):
                    part.go_on(place)
                continue
            is_search = known.submit.sampling.beams is not None
            views = views_of(known, [(found.num_tokens, found.ended) for found in own])
            for part, place, view in zip(request.parts, own, views, strict=True):
                part.go_on(place)
                if self._output.generate:
                    self._replay(part, view.tokens.tolist())
                if view.finish_reason and not part.settled:
                    ended = FinishReason(view.finish_reason)
                    self._waiting.append(ChoiceFinished(request.request_id, part.number, ended))
            if not all(view.finish_reason for view in views):
                self._engine.attach(known.submit, self.queue, () if is_search else views)

    async def accepted(self) -> None:
        """Wait until the engine has taken every request; until then it may still refuse.

        Raises:
            ApiError: 429 or 500, it refused one; 503, it could not be asked; 422, it has
                something else by this name; 409, a newer call delivers it.
            ClientLeft: nobody waits any more.
        """
        unanswered = set(self._by_id)
        while unanswered:
            for letter in await self.queue.take():
                self._waiting.append(letter)
                if not unanswered:
                    continue
                if isinstance(letter, ServerStopping):
                    self._aborted_because = "gateway shuts down"
                    raise shutting_down(accepted=False)
                if isinstance(letter, Superseded):
                    self.is_taken_over = True
                    raise taken_over()
                if isinstance(letter, Attached) and not self._is_repeated_in(letter.submit):
                    self._leave_alone()
                    raise other_body()
                if isinstance(letter, _BAD_NEWS):
                    self._open(letter)
                else:
                    unanswered.discard(letter.request_id)

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What is new, by choice, until all have finished.

        Raises:
            ApiError: the generation failed; what was shown so far is not all.
            ClientLeft: there is nobody to show it to.
            TakenOver: somebody else shows it.
        """
        running = sum(not part.settled for part in self._parts)
        while running:
            touched: dict[int, tuple[PendingRequest, Part]] = {}
            letters = self._waiting or await self.queue.take()
            self._waiting = letters[_LETTERS_AT_ONCE:]
            for letter in letters[:_LETTERS_AT_ONCE]:
                found = self._open(letter)
                if found is not None:
                    touched[found[1].index] = found
            shown = []
            for request, part in touched.values():
                delta = self._take(request, part)
                if delta is not None:
                    shown.append((part.index, delta))
                    if delta.finish_reason is not None:
                        running -= 1
                        self._settle(request, part)
            if shown:
                yield shown
            if self._waiting:
                await asyncio.sleep(0)  # a long backlog is not to keep others waiting

    def close(self, abort: bool = True) -> None:
        """Let go of the engine; must be called after the generation was handed to it.

        Args:
            abort: what still runs is of use to nobody.
        """
        for request in self._requests:
            if abort and request.engine_works:
                self._engine.abort(request.request_id, self.queue, self._aborted_because)
            else:
                self._engine.close(request.request_id, self.queue)
        self._metrics.open_streams.dec(len(self._requests))

    def abandon(self, after_s: float) -> None:
        """Like ``close``, but somebody else may want what still runs: it is aborted after a while.

        Whoever has taken it over by then has made that Abort void.
        """
        for request in self._requests:
            if request.engine_works:
                self._engine.abandon(request.request_id, self.queue, after_s)
        self.close(abort=False)

    def note_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that had no good end."""
        for part in self._parts:
            if part.choice.finish_reason is None:
                self._metrics.request_success[reason.value].inc()

    def _open(self, letter: CallEvent) -> tuple[PendingRequest, Part] | None:
        """The choice that a letter says something new of."""
        if isinstance(letter, TokensArrived):  # nearly all are
            return self._open_tokens(letter)
        if isinstance(letter, ClientDisconnected):
            self._aborted_because = "client disconnected"
            raise ClientLeft
        if isinstance(letter, ServerStopping):
            self._aborted_because = "gateway shuts down"
            self.server_leaves = True
            raise shutting_down(accepted=True, resumable=self._display.resumable)
        if isinstance(letter, _NO_NEWS):
            return None
        if isinstance(letter, Superseded):
            self.is_taken_over = True
            raise TakenOver
        if isinstance(letter, EngineUnreachable):
            self._aborted_because = letter.why
            raise unavailable(letter.why)
        request = self._by_id[letter.request_id]
        if isinstance(letter, RequestFailed):
            self._fail(request, letter)
            return None
        if isinstance(letter, PromptScored):
            request.prompt_scores.update((item.row, item) for item in letter.positions)
            return None
        if isinstance(letter, PrefixFound):
            request.note_cached(letter.num_tokens)
            return None
        part = request.parts[letter.choice]
        part.engine_ended = True
        reason = letter.reason if self._output.generate else FinishReason.LENGTH
        part.choice.end(reason, letter.beam_score)
        return None if part.settled else (request, part)

    def _open_tokens(self, letter: TokensArrived) -> tuple[PendingRequest, Part] | None:
        request = self._by_id[letter.request_id]
        part = request.parts[letter.choice]
        if part.choice.finish_reason is not None and part.replay is None:
            return None  # the choice was cut short before the engine heard of it
        tokens, logprobs = letter.tokens, letter.logprobs
        request.observe_tokens(self._metrics, part, len(tokens), self._started_s)
        if not logprobs and request.planned.sampling.num_logprobs is not None:
            raise failed("the log-probability of a token is missing")
        if self._output.generate:
            if part.replay is not None:
                count = self._replay(part, tokens, logprobs)
                tokens, logprobs = tokens[count:], logprobs[count:]
            part.choice.push(tokens, logprobs)
        elif request.planned.scores_last and not request.note_last(tokens, logprobs):
            raise failed("the prompt's last token was not scored")
        return None if part.settled else (request, part)

    def _replay(
        self, part: Part, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> int:
        """How many of these tokens the client has already."""
        count = part.replayed(tokens, logprobs)
        if count is None:
            self._aborted_because = "the log has another history"
            why = "the log has another history of this request"
            raise failed(f"the stream cannot be continued: {why}", STREAM_LOST)
        return count

    def _submits(self) -> list[Submit]:
        attachment, received_ms = secrets.token_hex(8), int(time.time() * 1000)
        return [
            request.submit(self._engine.instance, attachment, received_ms)
            for request in self._requests
        ]

    def _is_repeated_in(self, submit: Submit) -> bool:
        """What the engine has is what is asked for here."""
        display = read_display(submit.display)
        return display is not None and display.fingerprint == self._display.fingerprint

    def _leave_alone(self) -> None:
        """What the engine has is another call's: closing this one must not abort it."""
        for request in self._requests:
            self._engine.close(request.request_id, self.queue)

    def _fail(self, request: PendingRequest, letter: RequestFailed) -> None:
        if all(part.choice.finish_reason is not None for part in request.parts):
            return  # all choices were cut short before the engine heard of it
        if letter.ended_in_engine:
            for part in request.parts:
                part.engine_ended = True
        self._aborted_because = letter.error
        if letter.overloaded:
            raise overloaded(letter.error)
        code = "generation_failed" if letter.ended_in_engine else STREAM_LOST
        raise failed(letter.error, code)

    def _take(self, request: PendingRequest, part: Part) -> Delta | None:
        delta = part.choice.take()
        if part.begun or delta is None or not self._output.echo:
            return delta
        part.begun = True
        text = request.echo + delta.text
        scored = delta.scored
        if self._output.num_logprobs is not None:
            prompt = request.planned.prompt
            num_top = self._output.num_logprobs
            scores = prompt_scores(prompt.tokens, request.prompt_scores, num_top)
            scored = echoed_scores(prompt, scores, self._tokenizer) + scored
        return replace(delta, text=text, scored=scored)

    def _settle(self, request: PendingRequest, part: Part) -> None:
        """One choice has all it will have."""
        part.settled = True
        choice = part.choice
        if choice.stopped and not part.engine_ended:
            stop = Stop(request.request_id, part.number, choice.num_tokens)
            self._engine.stop(stop, self.queue)
        assert choice.finish_reason is not None
        self._metrics.request_success[choice.finish_reason.value].inc()
        if request.settled:
            self._engine.close(request.request_id, self.queue)
            request.observe_end(self._metrics, self._started_s)
        else:
            self._engine.close_choice(
                request.request_id,
                part.number,
                choice.num_tokens,
                choice.finish_reason,
                self.queue,
            )

    def _new_request(self, identity: str, position: int, planned: Planned) -> PendingRequest:
        """For the prompt at a position in the call."""
        output = self._output
        context = planned.prompt.tokens if planned.continues else ()
        echo = self._echo_text(planned)
        sampling = planned.sampling
        shows_end = output.include_stop or sampling.beams is not None
        first = position * output.num_candidates
        parts = [
            Part(
                first + number,
                number,
                Choice(
                    self._tokenizer.detokenizer(context),
                    self._stops,
                    min_tokens=output.min_tokens,
                    offset=len(echo),
                    show_tokens=output.token_ids,
                    show_scores=output.num_logprobs is not None,
                    include_stop=output.include_stop,
                    silent_tokens=() if shows_end else sampling.stop_token_ids,
                ),
            )
            for number in range(output.num_candidates)
        ]
        scored = planned.prompt.tokens[-1] if planned.scores_last else None
        display = self._display.packed(planned.prompt.text, scored)
        return PendingRequest(identity, planned, parts, echo, display)

    def _echo_text(self, planned: Planned) -> str:
        if not self._output.echo:
            return ""
        text = planned.prompt.text
        return self._tokenizer.decode(planned.prompt.tokens) if text is None else text
