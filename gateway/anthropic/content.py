"""The content of an answer: blocks in the order in which they begin, and events that add to it."""

import json
from collections.abc import Iterator
from typing import Any

from gateway.answers.events import CallDelta
from gateway.openai.responses.chat_serializer import CallIds
from gateway.text.choice_text import Delta

Event = dict[str, Any]


class ContentBlocks:
    """Builds the blocks of one answer.

    Attributes:
        blocks: complete ones and, before the end, the one that goes on.
    """

    def __init__(self, call_ids: CallIds) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._call_ids = call_ids
        self._open: tuple[str, int] | None = None  # kind of the block that goes on, and its call
        self._texts: list[str] = []

    @property
    def has_calls(self) -> bool:
        """A tool was called."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta."""
        if delta.reasoning:
            yield from self._switch("thinking")
            yield self._more({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._switch("text")
            yield self._more({"type": "text_delta", "text": delta.text})
        for call in delta.calls:
            yield from self._switch("tool_use", call)
            if call.arguments:
                yield self._more({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[Event]:
        """The events of the end."""
        if self._open is None:
            return
        kind, block, text = self._open[0], self.blocks[-1], "".join(self._texts)
        self._open, self._texts = None, []
        if kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[kind] = text
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _switch(self, kind: str, call: CallDelta | None = None) -> Iterator[Event]:
        """Begin a block, unless it goes on."""
        key = (kind, 0 if call is None else call.index)
        if self._open == key:
            return
        yield from self.end()
        self._open = key
        block: dict[str, Any] = {"type": kind}
        if kind == "tool_use":
            assert call is not None
            block |= {"id": self._call_ids.of(0, call.index), "name": call.name or "", "input": {}}
        elif kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        else:
            block |= {"text": ""}
        self.blocks.append(block)
        index = len(self.blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _more(self, delta: dict[str, Any]) -> Event:
        [text] = [value for name, value in delta.items() if name != "type"]
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; what is no JSON object, the model's fault, is shown as it is."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"invalid_json": arguments}
