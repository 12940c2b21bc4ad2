"""The chat that a response continues: its instructions, earlier responses, and its input."""

from collections.abc import Iterable
from typing import Any

from gateway.http.errors import invalid_value
from gateway.responses.request.input_items import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    Message,
    ReasoningItem,
    text_of,
)


def items_of(given: str | list[Any]) -> list[InputItem]:
    """The input as items; a text is a message of the user."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    return given


def chat_messages(instructions: str | None, items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """The messages for the chat template, as the body of a chat has them.

    Calls and reasoning belong to the assistant's message beside them.

    Raises:
        ApiError: 400, an output of a call that is not there.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning: list[str] = []
    known: set[str] = set()
    for item in items:
        if isinstance(item, ReasoningItem):
            shown = item.content or item.summary or ()
            reasoning += [part.text for part in shown]
        elif isinstance(item, FunctionCall):
            known.add(item.call_id)
            _of_assistant(messages, reasoning).setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, FunctionCallOutput):
            if item.call_id not in known:
                raise invalid_value("input", item.call_id, "no call has this call_id")
            content = text_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, Message) and item.role == "assistant":
            _add_text(messages, reasoning, text_of(item.content))
        elif isinstance(item, Message):
            messages.append({"role": item.role, "content": text_of(item.content)})
            reasoning.clear()
    return messages


def _of_assistant(messages: list[dict[str, Any]], reasoning: list[str]) -> dict[str, Any]:
    """The assistant's message that is last, a new one if another's is."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append({"role": "assistant", "content": None})
        _add_reasoning(messages[-1], reasoning)
    return messages[-1]


def _add_text(messages: list[dict[str, Any]], reasoning: list[str], text: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] is None and not reasoning:
        last["content"] = text  # what it said after calls, or beside them
        return
    messages.append({"role": "assistant", "content": text})
    _add_reasoning(messages[-1], reasoning)


def _add_reasoning(message: dict[str, Any], reasoning: list[str]) -> None:
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
        reasoning.clear()


def _call(item: FunctionCall) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}
