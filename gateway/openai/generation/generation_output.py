"""What a generation shows to its client: what is new by choice, usage, and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gateway.answers.answer_formats import AnswerFormats, UnknownFormat
from gateway.answers.events import AnswerParser
from gateway.engine.events import ChoiceFinished, PrefixFound, PromptScored, TokensArrived
from gateway.http.errors import failed
from gateway.openai.generation.prompt_requests import Choice, PromptRequest
from gateway.openai.responses.serializer import Usage
from gateway.prompts.prompt import Prompt
from gateway.prompts.prompt_logprobs import PromptScores, echoed_scores, prompt_scores
from gateway.resume.event_ids import Position, StreamPosition
from gateway.resume.stream_context import Display
from gateway.text.choice_text import ChoiceText, Delta, TextOptions
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import FinishReason
from shared.messages.requests import Submit
from shared.metrics import ModelMetrics

_PROMPT_END_TOKENS = 256  # of a prompt, in which the answer's message may have begun


class GenerationOutput:
    """Turns the engine's events into deltas of choices.

    Choice ``j`` of prompt ``i`` has the index ``i * num_candidates + j``.

    Args:
        submits: one for each prompt.
        started_s: monotonic time at which the call arrived.
        formats: None where no answers are parsed.

    Attributes:
        display: how the answer is shown.
        requests: one for each prompt.
        choices: of all requests, by index.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        display: Display,
        prompts: Sequence[Prompt],
        submits: Sequence[Submit],
        started_s: float,
        formats: AnswerFormats | None = None,
    ) -> None:
        self.display = display
        self._options = display.output
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._started_s = started_s
        self._formats = formats
        self._cached_before = 0
        stops = StopStrings(self._options.stops)
        self.requests = [
            self._new_request(position, prompt, submit, stops)
            for position, (prompt, submit) in enumerate(zip(prompts, submits, strict=True))
        ]
        self.choices = [choice for request in self.requests for choice in request.choices]
        self._by_id = {request.id: request for request in self.requests}

    def request(self, request_id: str) -> PromptRequest:
        """The request with this id."""
        return self._by_id[request_id]

    @property
    def num_undelivered(self) -> int:
        """Choices of which the client lacks something."""
        return sum(not choice.delivered for choice in self.choices)

    def best(self) -> list[int]:
        """Indexes of the choices to show: of each prompt the likeliest, in that order."""
        options = self._options
        if not options.is_ranked:
            return list(range(len(self.choices)))
        chosen: list[int] = []
        for request in self.requests:
            ranked = sorted(request.choices, key=lambda choice: -choice.text.mean_logprob)
            chosen += [choice.index for choice in ranked[: options.num_choices]]
        return chosen

    @property
    def scores_prompts(self) -> bool:
        """The answer has log-probabilities of prompts, which may be thousands of tokens."""
        return self.requests[0].submit.sampling.num_prompt_logprobs is not None

    def prompt_scores(self) -> list[PromptScores]:
        """Scores of each prompt if they are shown beside the texts, else an empty list.

        Raises:
            ApiError: 500, the engine did not send all of them.
        """
        num_top = self._options.num_prompt_logprobs
        if num_top is None:
            return []
        return [
            prompt_scores(request.prompt.tokens, request.prompt_scores, num_top)
            for request in self.requests
        ]

    @property
    def usage(self) -> Usage:
        """Tokens used so far."""
        num_prompt_tokens = sum(len(request.prompt.tokens) for request in self.requests)
        return Usage(
            self.display.num_prompt_tokens or num_prompt_tokens,
            sum(request.num_generated for request in self.requests),
            self.cached_tokens,
            sum(choice.text.num_reasoning for choice in self.choices),
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache."""
        found = sum(request.cached_tokens for request in self.requests)
        return max(found, self._cached_before)

    @property
    def finish_reasons(self) -> str:
        """How the choices ended, for the access log."""
        reasons = (choice.text.finish_reason or FinishReason.ABORT for choice in self.choices)
        return ",".join(sorted(set(reasons)))

    def count_unfinished(self, reason: FinishReason) -> None:
        """Count the choices that have no finish reason under this one."""
        for choice in self.choices:
            if choice.text.finish_reason is None:
                self._metrics.request_success[reason.value].inc()

    def resume_at(self, position: StreamPosition) -> None:
        """Continue after what the client has."""
        self._cached_before = position.cached_tokens
        positions = position.choices or [Position()] * len(self.choices)
        for choice, place in zip(self.choices, positions, strict=True):
            choice.resume_at(place)

    def add_tokens(self, event: TokensArrived) -> Choice | None:
        """Append tokens to a choice.

        Returns:
            The choice, None if it had ended before.

        Raises:
            ApiError: 500, a log-probability is missing.
            HistoryDiffers: the client has other tokens.
        """
        request = self._by_id[event.request_id]
        choice = request.choices[event.choice]
        if choice.text.finish_reason is not None and choice.replay is None:
            return None  # it ended at a stop string before the Stop reached the engine
        tokens, logprobs = event.tokens, event.logprobs
        request.observe_tokens(self._metrics, choice, len(tokens), self._started_s)
        if not logprobs and request.submit.sampling.num_logprobs is not None:
            raise failed("the log-probability of a token is missing")
        if self._options.generate:
            if choice.replay is not None:
                count = choice.skip_replayed(tokens, logprobs)
                tokens, logprobs = tokens[count:], logprobs[count:]
            choice.text.push(tokens, logprobs)
        elif request.prompt.scores_last and not request.score_last_token(tokens, logprobs):
            raise failed("the prompt's last token was not scored")
        return None if choice.delivered else choice

    def finish_choice(self, event: ChoiceFinished) -> Choice | None:
        """End a choice; return it unless the client was sent its end before."""
        choice = self._by_id[event.request_id].choices[event.choice]
        choice.engine_finished = True
        reason = event.reason if self._options.generate else FinishReason.LENGTH
        choice.text.end(reason, event.beam_score)
        return None if choice.delivered else choice

    def add_prompt_facts(self, event: PromptScored | PrefixFound) -> None:
        """Take scores of a prompt's tokens, or how many were found in the prefix cache."""
        request = self._by_id[event.request_id]
        if isinstance(event, PrefixFound):
            request.set_cached(event.num_tokens)
        else:
            request.prompt_scores.update((item.row, item) for item in event.positions)

    def take(self, choice: Choice) -> Delta | None:
        """What is new in a choice, with the echo before its first delta; None if nothing is."""
        delta = choice.text.take()
        options = self._options
        if choice.begun or delta is None or not options.echo:
            return delta
        choice.begun = True
        request = self._request_of(choice)
        text = request.echo + delta.text
        scored = delta.scored
        if options.num_logprobs is not None:
            scores = prompt_scores(
                request.prompt.tokens, request.prompt_scores, options.num_logprobs
            )
            scored = echoed_scores(request.prompt, scores, self._tokenizer) + scored
        return replace(delta, text=text, scored=scored)

    def mark_delivered(self, choice: Choice) -> PromptRequest:
        """Count a choice of which the client was sent all; return its request."""
        choice.delivered = True
        assert choice.text.finish_reason is not None
        self._metrics.request_success[choice.text.finish_reason.value].inc()
        request = self._request_of(choice)
        if request.delivered:
            request.observe_end(self._metrics, self._started_s)
        return request

    def _request_of(self, choice: Choice) -> PromptRequest:
        return self.requests[choice.index // self._options.num_candidates]

    def _new_request(
        self, position: int, prompt: Prompt, submit: Submit, stops: StopStrings
    ) -> PromptRequest:
        """The request for the prompt at a position in the call."""
        shown = self._options
        echo, answers = self._echo_text(prompt), self.display.answers
        ends_silently = not shown.include_stop and submit.sampling.beams is None
        options = TextOptions(
            stops,
            min_tokens=shown.min_tokens,
            offset=len(echo),
            show_tokens=shown.token_ids,
            show_scores=shown.num_logprobs is not None,
            include_stop=shown.include_stop,
            silent_tokens=submit.sampling.stop_token_ids if ends_silently else (),
            ends_with_call=answers is not None and not answers.parallel,
            has_reasoning=answers is not None and answers.reasoning != "",
        )
        context = () if self.display.is_chat else prompt.tokens  # that the text continues
        first = position * shown.num_candidates
        new_parser, names = self._parsing(prompt)
        choices = [
            Choice(
                first + number,
                number,
                ChoiceText(self._tokenizer.detokenizer(context, names), options, new_parser()),
            )
            for number in range(shown.num_candidates)
        ]
        return PromptRequest(prompt, submit, choices, echo)

    def _parsing(
        self, prompt: Prompt
    ) -> tuple[Callable[[], AnswerParser | None], Mapping[str, int]]:
        """What makes the parsers of the choices, and the special tokens that they must see."""
        answers, formats = self.display.answers, self._formats
        if answers is None or formats is None:
            return lambda: None, {}
        last = prompt.tokens[-_PROMPT_END_TOKENS:]
        try:
            new = formats.parsers(answers, self._tokenizer.decode(last, skip_special=False))
        except UnknownFormat as error:
            raise failed(f"this gateway does not parse answers of the format {error}") from None
        return new, formats.shown_tokens(answers)

    def _echo_text(self, prompt: Prompt) -> str:
        if not self._options.echo:
            return ""
        return self._tokenizer.decode(prompt.tokens) if prompt.text is None else prompt.text
