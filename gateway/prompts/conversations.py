"""Turns the messages of a body into the input of chat templates, and renders them."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from gateway.openai.requests.messages import ChatMessage, ChatTool, ToolCall
from gateway.prompts.control_tokens import Conversation, RenderedChat
from gateway.prompts.template_options import DEFAULT_TEMPLATE_OPTIONS, TemplateOptions
from gateway.prompts.template_threads import TemplateThreads
from gateway.text.tokenizer import Tokenizer

DEFAULT_LIMIT_S = 2.0


class ChatRenderer:
    """Renders conversations on threads.

    Args:
        limit_s: time limit of a template.
    """

    def __init__(self, tokenizer: Tokenizer, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._threads = TemplateThreads(limit_s)
        self._knows_developers = tokenizer.template_reads("developer")

    async def rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] | None,
        options: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS,
        caller: str = "",
    ) -> RenderedChat:
        """The text of a conversation.

        Args:
            caller: threads are shared fairly between callers.

        Raises:
            TemplateRefused: the template raised an error, or took too long.
            ApiError: 429, no thread was free in time.
        """

        def render() -> RenderedChat:
            return self._tokenizer.render_with_control_tokens(
                conversation(messages, tools, options, self._knows_developers)
            )

        return await self._threads.run(render, caller)

    def close(self) -> None:
        """Stop the threads; no other method may be called afterwards."""
        self._threads.close()


def conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatTool] | None = None,
    options: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS,
    knows_developers: bool = False,
) -> Conversation:
    """The input of a chat template; few templates take parts.

    Args:
        knows_developers: messages of the developer are not the system's.
    """
    return Conversation(
        [_plain_message(message, knows_developers) for message in messages],
        [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        options,
    )


def _plain_message(message: ChatMessage, knows_developers: bool) -> dict[str, Any]:
    content = message.content or ""
    is_system = message.role == "developer" and not knows_developers
    plain: dict[str, Any] = {
        "role": "system" if is_system else message.role,
        "content": content if isinstance(content, str) else "\n".join(p.text for p in content),
    }
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """The tool call with parsed arguments, since templates write JSON by themselves."""
    arguments: Any = call.function.arguments
    try:
        # The parser of bodies: it refuses deep nesting and lone surrogates, as in all other fields.
        parsed = from_json(arguments)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
