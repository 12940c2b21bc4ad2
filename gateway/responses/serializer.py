"""Serializes a response while it is generated, for the client that asked for it."""

import time
from collections.abc import Iterable, Sequence

from gateway.http.errors import ApiError
from gateway.http.long_responses import dumped
from gateway.openai.responses.serializer import StreamEvent, Usage
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.responses.events import ResponseView, encoded
from gateway.responses.output_items import Event
from gateway.responses.records import ResponseEnded
from gateway.text.choice_text import Delta
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs


class ResponseSerializer:
    """Writes the events of one response, or its object.

    Attributes:
        view: makes events and the object.
        tokens, logprobs: of the answer so far.
    """

    def __init__(self, view: ResponseView) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.view = view
        self._begun = False
        self._reason = FinishReason.ABORT

    def resume(self, begun: Iterable[int]) -> None:
        """Streams of responses are continued by their numbers of events."""

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta; its tokens are kept."""
        events = [] if self._begun else list(self.view.begin())
        self._begun = True
        scores = [item.scores for item in delta.scored if item.scores is not None]
        self.tokens += delta.token_ids
        self.logprobs += scores
        for part in self.view.feed.push(delta.token_ids, scores):
            events += self.view.add(part)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        return events

    def ended(self, cached_tokens: int) -> ResponseEnded:
        """How it ended, when all is generated."""
        return ResponseEnded(self._reason.value, int(time.time()), cached_tokens)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:  # noqa: ARG002
        data = b"".join(map(encoded, self.take(delta)))
        return [StreamEvent(data, True, delta.finish_reason is not None)]

    def usage_chunk(self, usage: Usage) -> bytes:  # noqa: ARG002
        return b""  # the last event has it

    def done(self, usage: Usage) -> bytes:
        return b"".join(map(encoded, self.view.end(self.ended(usage.cached_tokens))))

    def error(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        ended = ResponseEnded(FinishReason.ERROR, int(time.time()), 0, str(error), code)
        events = [] if self._begun else list(self.view.begin())
        events += self.view.end(ended)
        shown = {"type": "error", "code": code, "message": str(error), "param": error.param}
        last = shown | {"sequence_number": events[-1]["sequence_number"]}
        events[-1]["sequence_number"] += 1
        return b"".join(map(encoded, [*events[:-1], last, events[-1]]))

    def whole(
        self,
        choices: Sequence[Delta],
        usage: Usage,
        prompts: Sequence[PromptScores],  # noqa: ARG002
    ) -> bytes:
        if not self._begun:
            self.take(choices[0])
        for _ in self.view.end(self.ended(usage.cached_tokens)):
            pass
        return dumped(self.view.shown())
