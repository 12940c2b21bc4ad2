"""The body of the chat that a response asks for, and errors in the words of its own body."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from gateway.http.errors import from_validation
from gateway.openai.requests.body import refuse_extra
from gateway.openai.requests.field_names import FieldNames
from gateway.openai.requests.ignored_fields import IGNORED
from gateway.openai.requests.messages import check_message, check_tools
from gateway.openai.requests.schema import ChatBody
from gateway.responses.request.body import (
    LOGPROBS,
    FunctionTool,
    NamedTool,
    ResponseBody,
    TextFormat,
)
from gateway.responses.request.conversation import chat_messages
from gateway.responses.request.input_items import InputItem
from shared.sampling import PARAMETERS

# Fields of a chat's body, as a response's body names them; the first that fits is taken.
NAMES = FieldNames(
    (re.compile(r"^response_format\.json_schema\.schema"), "text.format.schema"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_completion_tokens|^max_tokens"), "max_output_tokens"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^messages(\[\d+\])?(\.\w+)*"), "input"),
)


def chat_body(body: ResponseBody, history: Iterable[InputItem]) -> ChatBody:
    """The chat that a response asks for.

    Args:
        history: items of earlier responses and the input, in order.

    Raises:
        ApiError: 400.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat_messages(body.instructions, history),
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "deadline_ms": body.deadline_ms,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _choice(body),
        "response_format": _format(body.text.format) if body.text and body.text.format else None,
    }
    fields |= {name: getattr(body, name) for name in PARAMETERS}
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    with NAMES.used():
        try:
            chat = ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)[0]) from None
        refuse_extra(chat, "", IGNORED)
        for index, message in enumerate(chat.messages):
            check_message(message, f"messages[{index}].")
        check_tools(chat.tools or (), chat.tool_choice)
    return chat


def _tool(tool: FunctionTool) -> dict[str, Any]:
    shown = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": shown}


def _choice(body: ResponseBody) -> Any:
    if isinstance(body.tool_choice, NamedTool):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _format(given: TextFormat) -> dict[str, Any] | None:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name or "answer", "schema": given.schema_}
    return {"type": "json_schema", "json_schema": schema}
