"""The engine's requests that one HTTP call waits for, with their choices."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gateway.openai.validation import Prompt
from gateway.prompts.prompt_length import sampling_of_last
from gateway.resume.event_ids import Position, Replay
from gateway.text.choice import Choice
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit
from shared.metrics import GatewayMetrics
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Planned:
    """One prompt that is to be continued."""

    prompt: Prompt
    sampling: SamplingParams
    continues: bool  # the text continues the prompt's text, and is no text of its own
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    deadline_ms: int = 0  # wall clock; 0: none
    scores_last: bool = False  # what is generated is the prompt's last token, see prompt_length


def with_seed(planned: Planned, seed: int) -> Planned:
    """With a seed for what is drawn; a beam search draws nothing."""
    if planned.sampling.beams is not None:
        return planned
    return replace(planned, sampling=replace(planned.sampling, seed=seed))


def scoring_last(planned: Planned) -> Planned:
    """Only looks at the prompt, which leaves no room for anything else."""
    sampling = sampling_of_last(planned.prompt, planned.sampling)
    return replace(planned, sampling=sampling, scores_last=True)


class Part:
    """One choice of a request.

    Attributes:
        index: in the call, over all its requests.
        number: in its request, as the engine counts.
        engine_ended: the engine generates no more of it.
        settled: all of it was shown.
        begun: the client has the text before that of the choice.
        replay: what the client has seen and is to come from the log once more.
    """

    def __init__(self, index: int, number: int, choice: Choice) -> None:
        self.index = index
        self.number = number
        self.choice = choice
        self.engine_ended = False
        self.settled = False
        self.begun = False
        self.replay: Replay | None = None
        self.last_token_s: float | None = None

    def go_on(self, position: Position) -> None:
        """The client has so much of it."""
        self.begun = position.begun
        if position.num_tokens:
            self.replay = Replay(position)
        if position.ended:
            # With which reason is told already; tokens are compared, and not shown.
            self.choice.skip_all(position.num_tokens, FinishReason.STOP)
            self.settled = True

    def replayed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int | None:
        """Take what the client has: how many of these tokens, or None if it has seen others."""
        if self.replay is None:
            return 0
        count = self.replay.take(tokens)
        if count is not None:
            self.choice.push(tokens[:count], logprobs[:count])
            self.choice.skip()
            if self.replay.is_over:
                self.replay = None
        return count


class PendingRequest:
    """One prompt and the choices that continue it.

    Attributes:
        echo: text that stands before that of every choice.
        prompt_scores: log-probabilities by position, if the engine was asked for them.
        cached_tokens: of the prompt, found in the prefix cache.
        display: how it is shown, for the next gateway that has to.
    """

    def __init__(
        self,
        request_id: str,
        planned: Planned,
        parts: Sequence[Part],
        echo: str,
        display: bytes,
    ) -> None:
        self.request_id = request_id
        self.display = display
        self.planned = planned
        self.parts = parts
        self.echo = echo
        self.prompt_scores: dict[int, TokenLogprobs] = {}
        self.cached_tokens = 0

    @property
    def settled(self) -> bool:
        """All choices were shown."""
        return all(part.settled for part in self.parts)

    @property
    def engine_works(self) -> bool:
        """There is something left for the engine to do, and nobody told it not to."""
        return not all(part.engine_ended or part.settled for part in self.parts)

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(part.choice.num_tokens for part in self.parts)

    def note_cached(self, num_tokens: int) -> None:
        """Tokens that lay in the prefix cache; what was generated is none of the prompt's."""
        self.cached_tokens = min(num_tokens, len(self.planned.prompt.tokens))

    def note_last(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Take the last token of the prompt, which was generated; False if it is another one."""
        prompt = self.planned.prompt.tokens
        self.prompt_scores.update((len(prompt) - 1, item) for item in logprobs)
        return all(token == prompt[-1] for token in tokens)

    def submit(self, gateway: str, attachment: str, received_ms: int) -> Submit:
        """What the engine is told."""
        tokens = self.planned.prompt.tokens
        return Submit(
            request_id=self.request_id,
            gateway=gateway,
            attachment=attachment,
            prompt=np.asarray(tokens[:-1] if self.planned.scores_last else tokens, dtype=np.int32),
            sampling=self.planned.sampling,
            received_ms=received_ms,
            num_choices=len(self.parts),
            priority=self.planned.priority,
            cache_salt=self.planned.cache_salt,
            tenant=self.planned.tenant,
            deadline_ms=self.planned.deadline_ms,
            display=self.display,
        )

    def observe_tokens(
        self, metrics: GatewayMetrics, part: Part, num_tokens: int, started_s: float
    ) -> None:
        """Tokens that came together are counted as evenly spaced since those before them.

        Those of a beam search all come at its end, with no time between them to speak of.
        """
        now = time.monotonic()
        if part.last_token_s is None:
            if all(other.last_token_s is None for other in self.parts):
                metrics.time_to_first_token.observe(now - started_s)
            num_gaps, gap = num_tokens - 1, 0.0
            if self.planned.sampling.beams is not None:
                num_gaps = 0
        else:
            num_gaps, gap = num_tokens, (now - part.last_token_s) / num_tokens
        for _ in range(num_gaps):
            metrics.inter_token_latency.observe(gap)
        part.last_token_s = now

    def observe_end(self, metrics: GatewayMetrics, started_s: float) -> None:
        """The last choice was shown."""
        metrics.e2e_request_latency.observe(time.monotonic() - started_s)
        metrics.request_prompt_tokens.observe(len(self.planned.prompt.tokens))
        metrics.prompt_tokens_cached.inc(self.cached_tokens)
        metrics.request_generation_tokens.observe(self.num_generated)
