"""The text of one choice: tokens in, text out, cut at a stop string."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.answers.events import (
    AnswerEvent,
    AnswerParser,
    CallBegun,
    CallDelta,
    CallEnded,
    Reasoning,
    merged,
)
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopFinder, StopStrings
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability."""

    token: int
    offset: int  # characters of text before it
    scores: TokenLogprobs | None  # None for the first token of a prompt


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a choice since its last delta.

    Attributes:
        text: content of the answer, if it is parsed.
        has_calls: the choice has called a tool, in this delta or before.
        shows_held: part of it was held back until the choice ended, so that it does not follow
            from the tokens without the end.
    """

    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    finish_reason: FinishReason | None
    beam_score: float | None  # with the finish reason, of what a beam search found
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    has_calls: bool = False
    shows_held: bool = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What all choices of one request have in common.

    Attributes:
        min_tokens: stop strings are not looked for in the text of so many first tokens.
        offset: characters that the client sees before the text, for offsets of tokens.
        show_tokens: token ids are shown, even before they make text.
        show_scores: log-probabilities are shown, and not only added up.
        include_stop: the text ends with the stop string that was found.
        silent_tokens: end the choice, and have no text.
        ends_with_call: the choice ends with its first call of a tool.
        has_reasoning: its parser looks for reasoning, whose tokens are counted.
    """

    stops: StopStrings
    min_tokens: int = 0
    offset: int = 0
    show_tokens: bool = False
    show_scores: bool = False
    include_stop: bool = False
    silent_tokens: Collection[int] = ()
    ends_with_call: bool = False
    has_reasoning: bool = False


class ChoiceText:
    """The text of one sequence.

    Args:
        parser: finds reasoning and calls of tools in the text; None: all of it is content.

    Attributes:
        num_tokens: generated tokens that count, the last one included even if it is cut.
        num_reasoning: those that the model reasoned with.
        finish_reason: None while more is to come.
        stopped: a stop string or a call ended it, which the engine cannot see.
    """

    def __init__(
        self, detokenizer: Detokenizer, options: TextOptions, parser: AnswerParser | None = None
    ) -> None:
        self.num_tokens = self.num_reasoning = 0
        self.finish_reason: FinishReason | None = None
        self.stopped = False
        self._detokenizer = detokenizer
        self._options = options
        self._stops = StopFinder(options.stops, options.include_stop)
        self._chars = options.offset
        self._sum_logprobs = 0.0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._scored: list[ScoredToken] = []
        self._finish_taken = False
        self._beam_score: float | None = None
        self._parser = parser
        self._events: list[AnswerEvent] = []
        self._has_calls = self._is_reasoning = False
        self._shows_held = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None: another end, or none."""
        return self._stops.found

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, 0 if there are none."""
        return self._sum_logprobs / max(1, self.num_tokens)

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append tokens, with a log-probability for each or none at all."""
        options = self._options
        for index, token in enumerate(tokens):
            if self.finish_reason is not None:
                return
            self.num_tokens += 1
            self._token_ids.append(token)
            if logprobs:
                self._sum_logprobs += logprobs[index].logprob
                if options.show_scores:
                    self._scored.append(ScoredToken(token, self._chars, logprobs[index]))
            if token not in options.silent_tokens:
                self._show(self._detokenizer.push(token))
                if options.ends_with_call or options.has_reasoning:
                    self._parse()  # what a token belongs to must not depend on those beside it
            self.num_reasoning += self._is_reasoning

    def end(self, reason: FinishReason, beam_score: float | None = None) -> None:
        """End the choice; text that was held back becomes new text."""
        if self.finish_reason is not None:
            return
        num_chars = sum(map(len, self._text))
        self._show(self._detokenizer.finish())
        if self.finish_reason is None:
            self._text.append(self._stops.finish())
            self.finish_reason = reason
            self._beam_score = beam_score
        self._shows_held = sum(map(len, self._text)) > num_chars

    def take(self) -> Delta | None:
        """Everything since the last call, None if it holds nothing to show."""
        self._parse()
        text = "".join(self._text)
        finishes = self.finish_reason is not None and not self._finish_taken
        shows = text or self._events or finishes
        if not (shows or (self._options.show_tokens and self._token_ids)):
            return None
        parsed = merged(self._events)
        delta = Delta(
            text or parsed.content,
            self._token_ids,
            self._scored,
            self.finish_reason,
            self._beam_score,
            parsed.reasoning,
            parsed.calls,
            self._has_calls,
            self._shows_held,
        )
        self._drop()
        self._finish_taken = finishes
        return delta

    def skip(self) -> None:
        """Drop what is new: the client has it from another stream."""
        self._parse()
        self._drop()

    def skip_all(self, num_tokens: int, reason: FinishReason) -> None:
        """Mark all of it, with its end, as shown: the client has it from another stream."""
        self.num_tokens, self.finish_reason, self._finish_taken = num_tokens, reason, True
        self._drop()

    def _drop(self) -> None:
        self._text, self._token_ids, self._scored, self._events = [], [], [], []

    def _parse(self) -> None:
        """Turn new text into events, all of it if the choice has ended."""
        if self._parser is None:
            return
        events = self._parser.feed("".join(self._text))
        if self.finish_reason is not None:
            held = self._parser.finish()
            events += held
            self._shows_held = self._shows_held or bool(held)
            self._parser = None
        self._text.clear()
        for event in events:
            self._events.append(event)
            self._has_calls = self._has_calls or isinstance(event, CallBegun)
            self._is_reasoning = isinstance(event, Reasoning)
            if self._options.ends_with_call and isinstance(event, CallEnded):
                if self.finish_reason is None:
                    self.finish_reason, self.stopped = FinishReason.STOP, True
                self._parser = None
                return

    def _show(self, text: str) -> None:
        if not text:
            return
        self._chars += len(text)
        if self.num_tokens > self._options.min_tokens:
            text = self._stops.push(text)
            if self._stops.found is not None:
                self.finish_reason = FinishReason.STOP
                self.stopped = True
        self._text.append(text)
