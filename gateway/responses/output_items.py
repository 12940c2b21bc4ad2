"""The output of a response: items in the order in which they begin, and events that add to them."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.answers.events import CallDelta
from gateway.openai.responses.chat_serializer import CallIds
from gateway.openai.responses.logprobs import finite
from gateway.text.choice_text import Delta, ScoredToken
from gateway.text.tokenizer import Tokenizer

Event = dict[str, Any]
"""An event without its number."""

_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc", "input": "item"}


def item_id(response_id: str, kind: str, index: int) -> str:
    """Id of an item: the same whenever the response is read."""
    digest = hashlib.blake2b(f"{response_id}/{index}".encode(), digest_size=16, person=b"item")
    return f"{_PREFIX[kind]}_{digest.hexdigest()}"


class OutputItems:
    """Builds the items of one answer.

    Attributes:
        items: complete ones and, at the end, the one that goes on.
    """

    def __init__(self, response_id: str, call_ids: CallIds, tokenizer: Tokenizer) -> None:
        self.items: list[dict[str, Any]] = []
        self._response_id = response_id
        self._call_ids = call_ids
        self._tokenizer = tokenizer
        self._open: tuple[str, int] | None = None  # kind of the item that goes on, and its call
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta."""
        if delta.reasoning:
            yield from self._switch("reasoning")
            yield self._more("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.text:
            yield from self._switch("message")
            shown = [self._scored(item) for item in delta.scored if item.scores is not None]
            self._logprobs += shown
            yield self._more(
                "response.output_text.delta", delta.text, content_index=0, logprobs=shown
            )
        for call in delta.calls:
            yield from self._switch("function_call", call)
            if call.arguments:
                yield self._more("response.function_call_arguments.delta", call.arguments)

    def end(self, is_complete: bool) -> Iterator[Event]:
        """The events of the end; an answer without any text has an empty message."""
        if not self.items and is_complete:
            yield from self._switch("message")
        yield from self._close("completed" if is_complete else "incomplete")

    def _switch(self, kind: str, call: CallDelta | None = None) -> Iterator[Event]:
        """Begin an item, unless it goes on."""
        key = (kind, 0 if call is None else call.index)
        if self._open == key:
            return
        yield from self._close("completed")
        self._open = key
        index = len(self.items)
        item: dict[str, Any] = {
            "id": item_id(self._response_id, kind, index),
            "type": kind,
            "status": "in_progress",
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            assert call is not None
            call_id = self._call_ids.of(0, call.index)
            item |= {"call_id": call_id, "name": call.name or "", "arguments": ""}
        self.items.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {name: list(v) if isinstance(v, list) else v for name, v in item.items()},
        }
        if kind != "function_call":
            yield self._of_item(
                "response.content_part.added", content_index=0, part=self._part("", [])
            )

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that goes on, if there is one."""
        if self._open is None:
            return
        kind, item = self._open[0], self.items[-1]
        text, logprobs = "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
        else:
            part = self._part(text, logprobs)
            item["content"] = [part]
            if kind == "message":
                yield self._of_item(
                    "response.output_text.done", content_index=0, text=text, logprobs=logprobs
                )
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        index = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        self._open = None

    def _more(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._of_item(kind, delta=text, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **fields}

    def _part(self, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        assert self._open is not None
        if self._open[0] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        shown = list(logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}

    def _scored(self, item: ScoredToken) -> dict[str, Any]:
        assert item.scores is not None
        ids, logprobs = item.scores.top_ids.tolist(), item.scores.top_logprobs.tolist()
        top = [self._token(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        return self._token(item.token, item.scores.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = data.decode(errors="replace")
        return {"token": text, "bytes": list(data), "logprob": finite(logprob)}
