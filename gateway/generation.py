"""One HTTP call's generation, from its Submits to the last token of its last choice."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gateway.admission import Output, Prompt
from gateway.choices import Choice, Delta, ScoredToken
from gateway.engine import EngineClient
from gateway.errors import ApiError, failed, shutting_down, unavailable
from gateway.mailbox import ClientGone, Letter, Mailbox, ServerLeaves
from gateway.sessions import ChoiceEnded, PromptScored, RequestFailed, TokensArrived
from gateway.tokenizer import Tokenizer
from gateway.wire import Usage
from shared.codec import IntArray
from shared.errors import BusUnavailable
from shared.messages import Abort, FinishReason, Stop, Submit, TokenLogprobs
from shared.metrics import GatewayMetrics
from shared.sampling import SamplingParams


class ClientLeft(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One choice that is to be generated."""

    prompt: Prompt
    sampling: SamplingParams
    continues: bool  # the text continues the prompt's text, and is no text of its own


class _Part:
    """One choice and the engine's request that makes it."""

    def __init__(self, request_id: str, index: int, planned: Planned, choice: Choice) -> None:
        self.request_id = request_id
        self.index = index
        self.planned = planned
        self.choice = choice
        self.prompt_scores: dict[int, TokenLogprobs] = {}
        self.engine_ended = False
        self.settled = False
        self.begun = False
        self.last_token_s: float | None = None


class Generation:
    """Submits the choices of one call and follows them.

    Args:
        call_id: 128 random bits in hex; the request of the first choice bears it too.
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
        self._echoes = [self._echo_text(item) for item in planned]
        self._parts = [
            _Part(
                call_id if index == 0 else secrets.token_hex(16),
                index,
                item,
                self._choice(index, item),
            )
            for index, item in enumerate(planned)
        ]
        self._by_id = {part.request_id: part for part in self._parts}
        self._aborted_because = "not finished"

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        prompt = sum(len(part.planned.prompt.tokens) for part in self._parts)
        return Usage(prompt, sum(part.choice.num_tokens for part in self._parts))

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
            Submit(
                request_id=part.request_id,
                gateway=self._engine.instance,
                attachment=self._attachment,
                prompt=_packed(part.planned.prompt.tokens),
                sampling=part.planned.sampling,
                received_ms=received_ms,
            )
            for part in self._parts
        ]
        self._metrics.open_streams.inc(len(self._parts))
        try:
            await self._engine.submit(submits, self.mailbox)
        except BusUnavailable as error:
            self._metrics.open_streams.dec(len(self._parts))
            raise unavailable(str(error)) from None

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What is new, by choice, until all have finished.

        Raises:
            ApiError: the generation failed; what was shown so far is not all.
            ClientLeft: there is nobody to show it to.
        """
        running = len(self._parts)
        while running:
            touched: dict[int, _Part] = {}
            for letter in await self.mailbox.take():
                part = self._open(letter)
                if part is not None:
                    touched[part.index] = part
            shown = []
            for part in touched.values():
                delta = self._take(part)
                if delta is not None:
                    shown.append((part.index, delta))
                    if delta.finish_reason is not None:
                        running -= 1
                        self._settle(part)
            if shown:
                yield shown

    def close(self) -> None:
        """Let go of the engine; what still runs is aborted. Must be called after ``submit``."""
        for part in self._parts:
            self._engine.close(part.request_id)
            if not part.engine_ended and not part.settled:
                self._engine.send(Abort(part.request_id, self._attachment, self._aborted_because))
        self._metrics.open_streams.dec(len(self._parts))

    def note_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that had no good end."""
        for part in self._parts:
            if part.choice.finish_reason is None:
                self._metrics.request_success[reason.value].inc()

    def _open(self, letter: Letter) -> _Part | None:
        if isinstance(letter, ClientGone):
            self._aborted_because = "client disconnected"
            raise ClientLeft
        if isinstance(letter, ServerLeaves):
            self._aborted_because = "gateway shuts down"
            raise shutting_down(accepted=True)
        part = self._by_id[letter.request_id]
        if part.choice.finish_reason is not None and not isinstance(letter, ChoiceEnded):
            return None  # the choice was cut short before the engine heard of it
        if isinstance(letter, RequestFailed):
            part.engine_ended = letter.engine_knows
            self._aborted_because = letter.error
            raise _failure(letter)
        if isinstance(letter, PromptScored):
            part.prompt_scores.update((item.row, item) for item in letter.positions)
            return None
        if isinstance(letter, TokensArrived):
            self._observe(part, len(letter.tokens))
            if self._output.num_logprobs is not None and not letter.logprobs:
                raise failed("the log-probability of a token is missing")
            if self._output.generate:
                part.choice.push(letter.tokens, letter.logprobs)
        elif isinstance(letter, ChoiceEnded):
            part.engine_ended = True
            reason = letter.reason if self._output.generate else FinishReason.LENGTH
            part.choice.end(reason)
        return part

    def _take(self, part: _Part) -> Delta | None:
        delta = part.choice.take()
        if part.begun or delta is None or not self._output.echo:
            return delta
        part.begun = True
        text = self._echoes[part.index] + delta.text
        scored = delta.scored
        if self._output.num_logprobs is not None:
            scored = self._scored_prompt(part) + scored
        return replace(delta, text=text, scored=scored)

    def _settle(self, part: _Part) -> None:
        """One choice has all it will have."""
        part.settled = True
        choice = part.choice
        if choice.stopped and not part.engine_ended:
            self._engine.send(Stop(part.request_id, 0, choice.num_tokens))
        self._engine.close(part.request_id)
        metrics = self._metrics
        assert choice.finish_reason is not None
        metrics.request_success[choice.finish_reason.value].inc()
        metrics.e2e_request_latency.observe(time.monotonic() - self._started_s)
        metrics.request_prompt_tokens.observe(len(part.planned.prompt.tokens))
        metrics.request_generation_tokens.observe(choice.num_tokens)

    def _observe(self, part: _Part, num_tokens: int) -> None:
        """Tokens that came together are counted as evenly spaced since those before them."""
        now = time.monotonic()
        if part.last_token_s is None:
            self._metrics.time_to_first_token.observe(now - self._started_s)
            num_gaps, gap = num_tokens - 1, 0.0
        else:
            num_gaps, gap = num_tokens, (now - part.last_token_s) / num_tokens
        for _ in range(num_gaps):
            self._metrics.inter_token_latency.observe(gap)
        part.last_token_s = now

    def _choice(self, index: int, planned: Planned) -> Choice:
        context = planned.prompt.tokens if planned.continues else ()
        return Choice(
            self._tokenizer.detokenizer(context),
            self._output.stops,
            min_tokens=self._output.min_tokens,
            offset=len(self._echoes[index]),
            show_tokens=self._output.token_ids,
        )

    def _echo_text(self, planned: Planned) -> str:
        if not self._output.echo:
            return ""
        text = planned.prompt.text
        return self._tokenizer.decode(planned.prompt.tokens) if text is None else text

    def _scored_prompt(self, part: _Part) -> list[ScoredToken]:
        tokens = part.planned.prompt.tokens
        detokenizer = self._tokenizer.detokenizer()
        scored, chars = [], 0
        for position, token in enumerate(tokens):
            scores = part.prompt_scores.get(position)
            if scores is None and position > 0:
                raise failed(f"the log-probability of prompt token {position} is missing")
            scored.append(ScoredToken(token, chars, scores if position else None))
            chars += len(detokenizer.push(token))
        return scored


def _failure(letter: RequestFailed) -> ApiError:
    return failed(letter.error, "generation_failed" if letter.engine_knows else "stream_lost")


def _packed(tokens: Sequence[int]) -> IntArray:
    return np.asarray(tokens, dtype=np.int32)
