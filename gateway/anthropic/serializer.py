"""Serializes answers of /v1/messages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.anthropic.content import ContentBlocks, Event
from gateway.http.errors import ApiError
from gateway.http.long_responses import dumped
from gateway.http.other_errors import messages_error
from gateway.openai.generation.token_feed import TokenFeed
from gateway.openai.responses.serializer import StreamEvent, Usage
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta
from shared.messages.endings import FinishReason


class MessageSerializer:
    """Writes a message, or its events.

    Content is made from the answer's tokens, one after the other, so that a stream and a message in
    one piece hold the same.
    """

    def __init__(self, feed: TokenFeed, call_id: str) -> None:
        self._feed = feed
        self._call_id = call_id
        self._content = ContentBlocks(feed.call_ids)
        self._begun = False
        self._reason = FinishReason.ABORT

    def resume(self, begun: Iterable[int]) -> None:
        """Streams of messages cannot be resumed."""

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:  # noqa: ARG002
        events: list[Event] = []
        if not self._begun:
            events.append({"type": "message_start", "message": self._message([], None)})
            self._begun = True
        events += self._take(delta)
        data = b"".join(map(_encoded, events))
        return [StreamEvent(data, True, delta.finish_reason is not None)]

    def usage_chunk(self, usage: Usage) -> bytes:  # noqa: ARG002
        return b""  # the last delta has it

    def done(self, usage: Usage) -> bytes:
        events = list(self._end())
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._feed.stop_string}
        events.append({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
        events.append({"type": "message_stop"})
        return b"".join(map(_encoded, events))

    def error(self, error: ApiError) -> bytes:
        return _encoded(messages_error(error, self._call_id))

    def whole(
        self,
        choices: Sequence[Delta],
        usage: Usage,
        prompts: Sequence[PromptScores],  # noqa: ARG002
    ) -> bytes:
        for _ in self._take(choices[0]):
            pass
        for _ in self._end():
            pass
        shown = self._message(self._content.blocks, self._stop_reason())
        return dumped(shown | {"usage": _usage(usage)})

    def _take(self, delta: Delta) -> Iterator[Event]:
        self._reason = delta.finish_reason or self._reason
        for part in self._feed.push(delta.token_ids):
            yield from self._content.add(part)

    def _end(self) -> Iterator[Event]:
        if not self._feed.has_ended:
            last = self._feed.end(self._reason)
            if last is not None:
                yield from self._content.add(last)
        yield from self._content.end()

    def _stop_reason(self) -> str:
        if self._reason is not FinishReason.STOP:
            return "max_tokens"  # Anthropic has no word for a deadline
        if self._feed.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._content.has_calls else "end_turn"

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        num_prompt = self._feed.num_prompt_tokens
        return {
            "id": f"msg_{self._call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._feed.display.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._feed.stop_string,
            "usage": _usage(Usage(num_prompt, 0, 0)),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _encoded(event: Event) -> bytes:
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode("ascii")
