"""The body of the chat that a message asks for, and errors in the words of its own body."""

import json
import re
from typing import Any

from pydantic import ValidationError

from gateway.anthropic.blocks import TextBlock, Thinking, ToolResult, ToolUse, text_of
from gateway.anthropic.body import CountBody, Message, MessagesBody
from gateway.http.errors import from_validation, invalid_value
from gateway.openai.requests.body import refuse_extra
from gateway.openai.requests.field_names import FieldNames
from gateway.openai.requests.ignored_fields import IGNORED
from gateway.openai.requests.messages import check_message, check_tools
from gateway.openai.requests.schema import ChatBody

# Fields of a chat's body, as a body of the Messages API names them; the first that fits is taken.
NAMES = FieldNames(
    (re.compile(r"^response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^max_completion_tokens"), "max_tokens"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^(messages(\[\d+\])?(\.\w+)*|continue_final_message)"), "messages"),
)


def chat_body(body: CountBody) -> ChatBody:
    """The chat that a message asks for.

    Raises:
        ApiError: 400.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    fields |= _template_fields(body, fields["messages"][-1])
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                },
            }
            for tool in body.tools
        ]
    fields |= _tool_choice(body)
    if isinstance(body, MessagesBody):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
        }
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
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


def _template_fields(body: CountBody, last: dict[str, Any]) -> dict[str, Any]:
    """What the chat template is told besides the messages."""
    fields: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True
    return fields


def _tool_choice(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    words = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": words.get(choice.type, named)}
    if choice.disable_parallel_tool_use is not None and body.tools:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = text_of(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    known: set[str] = set()
    for index, message in enumerate(body.messages):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_of_assistant(message, path, known))
        else:
            messages += _of_user(message, path, known)
    return messages


def _of_assistant(message: Message, path: str, known: set[str]) -> dict[str, Any]:
    """The assistant's message: its text, reasoning and calls."""
    texts, reasoning, calls = [], [], []
    for number, block in enumerate(message.content):
        if isinstance(block, ToolUse):
            known.add(block.id)
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            reasoning.append(block.thinking)
        else:
            reason = "results of tools belong into messages of the user"
            raise invalid_value(f"{path}[{number}].type", "tool_result", reason)
    shown: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        shown |= {"content": shown["content"] or None, "tool_calls": calls}
    if reasoning:
        shown["reasoning_content"] = "\n".join(reasoning)
    return shown


def _of_user(message: Message, path: str, known: set[str]) -> list[dict[str, Any]]:
    """The results of tools, and then what the user says."""
    results, texts = [], []
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResult):
            if block.tool_use_id not in known:
                reason = "no message of the assistant before has a tool_use of this id"
                raise invalid_value(f"{path}[{number}].tool_use_id", block.tool_use_id, reason)
            text = ("Error: " if block.is_error else "") + text_of(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            kind = getattr(block, "type", None)
            reason = "messages of the user have text and tool_result"
            raise invalid_value(f"{path}[{number}].type", kind, reason)
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results
