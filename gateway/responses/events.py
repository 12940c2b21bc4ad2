"""The events of a response, numbered, and the object that it is at any time."""

import json
from collections.abc import Iterator
from typing import Any

from gateway.openai.generation.token_feed import TokenFeed
from gateway.responses.output_items import Event, OutputItems
from gateway.responses.records import CANCELLED, ResponseAsked, ResponseEnded
from gateway.responses.request.body import ResponseBody, TextFormat
from gateway.text.choice_text import Delta
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import FinishReason

_CUT_OFF = {
    FinishReason.LENGTH.value: "max_output_tokens",
    FinishReason.DEADLINE.value: "deadline",
}


class ResponseView:
    """What clients see of one response.

    Args:
        feed: reads the tokens.

    Attributes:
        is_kept: clients can ask for it by its id.
    """

    def __init__(
        self,
        asked: ResponseAsked,
        body: ResponseBody,
        feed: TokenFeed,
        tokenizer: Tokenizer,
    ) -> None:
        self.asked = asked
        self.body = body
        self.feed = feed
        self.is_kept = body.is_kept
        self._items = OutputItems(asked.id, feed.call_ids, tokenizer)
        self._number = 0
        self._ended: ResponseEnded | None = None

    # ------------------------------------------------------------------- events

    def begin(self) -> Iterator[Event]:
        """The events before the first token."""
        shown = self.shown("in_progress")
        yield self._numbered({"type": "response.created", "response": shown})
        yield self._numbered({"type": "response.in_progress", "response": shown})

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of one token, or of several that show together."""
        return map(self._numbered, self._items.add(delta))

    def end(self, ended: ResponseEnded) -> Iterator[Event]:
        """The events behind the last token."""
        self._ended = ended
        # A stop string in the text may have ended it before the engine did.
        for delta in self._last(ended):
            yield from self.add(delta)
        yield from map(self._numbered, self._items.end(ended.reason == FinishReason.STOP))
        shown = self.shown()
        status = shown["status"]
        # Clients know no event of a cancelled response: it ends without one that completes it.
        kind = {"cancelled": "incomplete"}.get(status, status)
        yield self._numbered({"type": f"response.{kind}", "response": shown})

    def _last(self, ended: ResponseEnded) -> Iterator[Delta]:
        if self.feed.has_ended:
            return
        known = ended.reason in tuple(FinishReason)
        delta = self.feed.end(FinishReason(ended.reason) if known else FinishReason.ABORT)
        if delta is not None:
            yield delta

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._number
        self._number += 1
        return event

    # ------------------------------------------------------------------- object

    def shown(self, status: str = "") -> dict[str, Any]:
        """The response as an object.

        Args:
            status: while it goes on.
        """
        body, ended, asked = self.body, self._ended, self.asked
        status = status or (_status(ended) if ended is not None else "in_progress")
        sampling = asked.submit.sampling
        error = None
        if status == "failed" and ended is not None:
            error = {"code": "server_error", "message": ended.error}
        cut_off = _CUT_OFF.get(ended.reason) if ended is not None else None
        reasoning = body.reasoning
        return {
            "id": asked.id,
            "object": "response",
            "created_at": asked.created_s,
            "completed_at": ended.ended_s if ended and status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "error": error,
            "incomplete_details": {"reason": cut_off} if cut_off else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._items.items if ended is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
            "service_tier": "default",
            "store": self.is_kept,
            "temperature": sampling.temperature,
            "text": {"format": _format(None if body.text is None else body.text.format)},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended is not None else None,
            "user": (body.model_extra or {}).get("user"),
        }

    def _usage(self) -> dict[str, Any]:
        assert self._ended is not None
        num_prompt, num_output = self.feed.num_prompt_tokens, self.feed.num_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": self._ended.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.feed.num_reasoning},
            "total_tokens": num_prompt + num_output,
        }


def encoded(event: Event) -> bytes:
    """A Server-Sent Event."""
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode("ascii")


def _status(ended: ResponseEnded) -> str:
    if ended.reason == FinishReason.STOP:
        return "completed"
    if ended.reason in _CUT_OFF:
        return "incomplete"
    return "cancelled" if ended.reason == CANCELLED else "failed"


def _format(given: TextFormat | None) -> dict[str, Any]:
    if given is None or given.type == "text":
        return {"type": "text"}
    shown = given.model_dump(by_alias=True, exclude_none=True)
    return shown | {"strict": True} if given.type == "json_schema" else shown


def _choice(body: ResponseBody) -> Any:
    choice = body.tool_choice
    return "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump()
