"""One HTTP call's generation, from its Submits to the last token of its last choice."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from gateway.admission import Output
from gateway.choices import Choice, Delta, ScoredToken
from gateway.engine import EngineClient
from gateway.errors import failed, overloaded, shutting_down, unavailable
from gateway.events import (
    ChoiceFinished,
    PrefixFound,
    PromptScored,
    RequestAccepted,
    RequestFailed,
    TokensArrived,
)
from gateway.mailbox import ClientGone, Letter, Mailbox, ServerLeaves
from gateway.pending import Part, PendingRequest, Planned
from gateway.tokenizer import Tokenizer
from gateway.wire import Usage
from shared.errors import BusUnavailable
from shared.messages import Abort, FinishReason, Stop
from shared.metrics import GatewayMetrics


class ClientLeft(Exception):
    """The client closed its connection."""


class Generation:
    """Submits the prompts of one call and follows their choices.

    Choice ``j`` of prompt ``i`` has the index ``i * num_candidates + j``.

    Args:
        call_id: 128 random bits in hex; the request of the first prompt bears it too.
        started_s: monotonic time at which the call arrived.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        call_id: str,
        planned: Sequence[Planned],
        output: Output,
        started_s: float,
    ) -> None:
        self.mailbox = Mailbox()
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._output = output
        self._started_s = started_s
        self._attachment = secrets.token_hex(8)
        self._requests = [
            self._new_request(call_id if position == 0 else secrets.token_hex(16), position, item)
            for position, item in enumerate(planned)
        ]
        self._parts = [part for request in self._requests for part in request.parts]
        self._by_id = {request.request_id: request for request in self._requests}
        self._aborted_because = "not finished"
        self._early: list[Letter] = []  # taken while the engine was asked

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
    def usage(self) -> Usage:
        """What has been used so far."""
        return Usage(
            sum(len(request.planned.prompt.tokens) for request in self._requests),
            sum(request.num_generated for request in self._requests),
            sum(request.cached_tokens for request in self._requests),
        )

    @property
    def finish_reasons(self) -> str:
        """How the choices ended, for the access log."""
        reasons = (part.choice.finish_reason or FinishReason.ABORT for part in self._parts)
        return ",".join(sorted(set(reasons)))

    async def submit(self) -> None:
        """Hand everything to the engine.

        Raises:
            ApiError: 503, nothing was accepted.
        """
        received_ms = int(time.time() * 1000)
        submits = [
            request.submit(self._engine.instance, self._attachment, received_ms)
            for request in self._requests
        ]
        self._metrics.open_streams.inc(len(self._requests))
        try:
            await self._engine.submit(submits, self.mailbox)
        except BusUnavailable as error:
            self._metrics.open_streams.dec(len(self._requests))
            raise unavailable(str(error)) from None

    async def accepted(self) -> None:
        """Wait until the engine has taken every request; until then it may still refuse.

        Raises:
            ApiError: it refused one, or the generation failed.
            ClientLeft: nobody waits any more.
        """
        unanswered = set(self._by_id)
        while unanswered:
            for letter in await self.mailbox.take():
                self._early.append(letter)
                if not unanswered:
                    continue
                if isinstance(letter, ClientGone | ServerLeaves | RequestFailed):
                    self._open(letter)
                else:
                    unanswered.discard(letter.request_id)

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What is new, by choice, until all have finished.

        Raises:
            ApiError: the generation failed; what was shown so far is not all.
            ClientLeft: there is nobody to show it to.
        """
        running = len(self._parts)
        while running:
            touched: dict[int, tuple[PendingRequest, Part]] = {}
            letters, self._early = self._early or await self.mailbox.take(), []
            for letter in letters:
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

    def close(self) -> None:
        """Let go of the engine; what still runs is aborted. Must be called after ``submit``."""
        for request in self._requests:
            self._engine.close(request.request_id)
            if request.engine_works:
                reason = self._aborted_because
                self._engine.send(Abort(request.request_id, self._attachment, reason))
        self._metrics.open_streams.dec(len(self._requests))

    def note_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that had no good end."""
        for part in self._parts:
            if part.choice.finish_reason is None:
                self._metrics.request_success[reason.value].inc()

    def _open(self, letter: Letter) -> tuple[PendingRequest, Part] | None:
        """The choice that a letter says something new of."""
        if isinstance(letter, ClientGone):
            self._aborted_because = "client disconnected"
            raise ClientLeft
        if isinstance(letter, ServerLeaves):
            self._aborted_because = "gateway shuts down"
            raise shutting_down(accepted=True)
        request = self._by_id[letter.request_id]
        if isinstance(letter, RequestFailed):
            self._fail(request, letter)
            return None
        if isinstance(letter, RequestAccepted):
            return None
        if isinstance(letter, PromptScored):
            request.prompt_scores.update((item.row, item) for item in letter.positions)
            return None
        if isinstance(letter, PrefixFound):
            request.note_cached(letter.num_tokens)
            return None
        part = request.parts[letter.choice]
        if isinstance(letter, ChoiceFinished):
            part.engine_ended = True
            reason = letter.reason if self._output.generate else FinishReason.LENGTH
            part.choice.end(reason, letter.beam_score)
        elif part.choice.finish_reason is not None:
            return None  # the choice was cut short before the engine heard of it
        else:
            self._push(request, part, letter)
        return request, part

    def _push(self, request: PendingRequest, part: Part, letter: TokensArrived) -> None:
        request.observe_tokens(self._metrics, part, len(letter.tokens), self._started_s)
        if request.planned.sampling.num_logprobs is not None and not letter.logprobs:
            raise failed("the log-probability of a token is missing")
        if self._output.generate:
            part.choice.push(letter.tokens, letter.logprobs)

    def _fail(self, request: PendingRequest, letter: RequestFailed) -> None:
        if all(part.choice.finish_reason is not None for part in request.parts):
            return  # all choices were cut short before the engine heard of it
        if letter.engine_knows:
            for part in request.parts:
                part.engine_ended = True
        self._aborted_because = letter.error
        if letter.overloaded:
            raise overloaded(letter.error)
        code = "generation_failed" if letter.engine_knows else "stream_lost"
        raise failed(letter.error, code)

    def _take(self, request: PendingRequest, part: Part) -> Delta | None:
        delta = part.choice.take()
        if part.begun or delta is None or not self._output.echo:
            return delta
        part.begun = True
        text = request.echo + delta.text
        scored = delta.scored
        if self._output.num_logprobs is not None:
            scored = self._scored_prompt(request) + scored
        return replace(delta, text=text, scored=scored)

    def _settle(self, request: PendingRequest, part: Part) -> None:
        """One choice has all it will have."""
        part.settled = True
        choice = part.choice
        if choice.stopped and not part.engine_ended:
            self._engine.send(Stop(request.request_id, part.number, choice.num_tokens))
        assert choice.finish_reason is not None
        self._metrics.request_success[choice.finish_reason.value].inc()
        if request.settled:
            self._engine.close(request.request_id)
            request.observe_end(self._metrics, self._started_s)
        else:
            self._engine.close_choice(request.request_id, part.number)

    def _new_request(self, request_id: str, position: int, planned: Planned) -> PendingRequest:
        """For the prompt at a position in the call."""
        output = self._output
        context = planned.prompt.tokens if planned.continues else ()
        echo = self._echo_text(planned)
        first = position * output.num_candidates
        parts = [
            Part(
                first + number,
                number,
                Choice(
                    self._tokenizer.detokenizer(context),
                    output.stops,
                    min_tokens=output.min_tokens,
                    offset=len(echo),
                    show_tokens=output.token_ids,
                    show_scores=output.num_logprobs is not None,
                ),
            )
            for number in range(output.num_candidates)
        ]
        return PendingRequest(request_id, planned, parts, echo)

    def _echo_text(self, planned: Planned) -> str:
        if not self._output.echo:
            return ""
        text = planned.prompt.text
        return self._tokenizer.decode(planned.prompt.tokens) if text is None else text

    def _scored_prompt(self, request: PendingRequest) -> list[ScoredToken]:
        detokenizer = self._tokenizer.detokenizer()
        scored, chars = [], 0
        for position, token in enumerate(request.planned.prompt.tokens):
            scores = request.prompt_scores.get(position)
            if scores is None and position > 0:
                raise failed(f"the log-probability of prompt token {position} is missing")
            scored.append(ScoredToken(token, chars, scores if position else None))
            chars += len(detokenizer.push(token))
        return scored
