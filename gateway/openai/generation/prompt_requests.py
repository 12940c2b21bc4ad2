"""The engine's requests of one HTTP call, one for each prompt, with their choices."""

import time
from collections.abc import Sequence

from gateway.prompts.prompt import Prompt
from gateway.resume.event_ids import Position, Replay
from gateway.text.choice_text import ChoiceText
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit
from shared.metrics import ModelMetrics


class HistoryDiffers(Exception):
    """The log has other tokens of a choice than those that the client has."""


class Choice:
    """One choice of a request: its text, and how far it has come.

    Attributes:
        index: in the call, over all its requests.
        number: in its request, as the engine counts.
        engine_finished: the engine generates no more of it.
        delivered: the client was sent all of it.
        begun: the client has the text before that of the choice.
        replay: tokens that the client has and that come from the log once more; None: none.
    """

    def __init__(self, index: int, number: int, text: ChoiceText) -> None:
        self.index = index
        self.number = number
        self.text = text
        self.engine_finished = False
        self.delivered = False
        self.begun = False
        self.replay: Replay | None = None
        self.last_token_s: float | None = None

    def resume_at(self, position: Position) -> None:
        """Continue after what the client has of this choice."""
        self.begun = position.begun
        if position.num_tokens:
            self.replay = Replay(position)
        if position.ended:
            # The client has the finish reason already; tokens are compared and not shown.
            self.text.skip_all(position.num_tokens, FinishReason.STOP)
            self.delivered = True

    def skip_replayed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> int:
        """Append those of these tokens that the client has already, and return how many they are.

        Raises:
            HistoryDiffers: the client has other tokens.
        """
        if self.replay is None:
            return 0
        count = self.replay.take(tokens)
        if count is None:
            raise HistoryDiffers
        self.text.push(tokens[:count], logprobs[:count])
        self.text.skip()
        if self.replay.is_over:
            self.replay = None
        return count


class PromptRequest:
    """One prompt of a call and the choices that continue it.

    Attributes:
        id: of the request, as the engine and the log have it.
        submit: the message that asks the engine for it.
        choices: in the engine's order.
        echo: text that stands before that of every choice.
        prompt_scores: log-probabilities by position, if the request asks for them.
        cached_tokens: of the prompt, found in the prefix cache.
    """

    def __init__(
        self, prompt: Prompt, submit: Submit, choices: Sequence[Choice], echo: str
    ) -> None:
        self.id = submit.request_id
        self.prompt = prompt
        self.submit = submit
        self.choices = choices
        self.echo = echo
        self.prompt_scores: dict[int, TokenLogprobs] = {}
        self.cached_tokens = 0

    @property
    def delivered(self) -> bool:
        """The client was sent all choices."""
        return all(choice.delivered for choice in self.choices)

    @property
    def engine_works(self) -> bool:
        """The engine generates at least one choice that is not complete and was not stopped."""
        return not all(choice.engine_finished or choice.delivered for choice in self.choices)

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(choice.text.num_tokens for choice in self.choices)

    def set_cached(self, num_tokens: int) -> None:
        """Count tokens found in the prefix cache, generated ones left out."""
        self.cached_tokens = min(num_tokens, len(self.prompt.tokens))

    def score_last_token(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Take the score of the prompt's last token, which the engine generated.

        Returns:
            False if the engine generated another token.
        """
        prompt = self.prompt.tokens
        self.prompt_scores.update((len(prompt) - 1, item) for item in logprobs)
        return all(token == prompt[-1] for token in tokens)

    def observe_tokens(
        self, metrics: ModelMetrics, choice: Choice, num_tokens: int, started_s: float
    ) -> None:
        """Measure latencies; tokens that came together count as evenly spaced.

        Those of a beam search all come at its end, so no time between them is measured.
        """
        now = time.monotonic()
        if choice.last_token_s is None:
            if all(other.last_token_s is None for other in self.choices):
                metrics.time_to_first_token.observe(now - started_s)
            num_gaps, gap = num_tokens - 1, 0.0
            if self.submit.sampling.beams is not None:
                num_gaps = 0
        else:
            num_gaps, gap = num_tokens, (now - choice.last_token_s) / num_tokens
        for _ in range(num_gaps):
            metrics.inter_token_latency.observe(gap)
        choice.last_token_s = now

    def observe_end(self, metrics: ModelMetrics, started_s: float) -> None:
        """Measure the request when its last choice was delivered."""
        metrics.e2e_request_latency.observe(time.monotonic() - started_s)
        metrics.request_prompt_tokens.observe(len(self.prompt.tokens))
        metrics.prompt_tokens_cached.inc(self.cached_tokens)
        metrics.request_generation_tokens.observe(self.num_generated)
