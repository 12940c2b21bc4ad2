"""How the answer to a chat is parsed, from the fields of its body."""

from gateway.answers.answer_formats import AnswerFormats
from gateway.answers.call_body import is_name
from gateway.answers.options import AnswerOptions, ToolShape
from gateway.http.errors import ApiError, invalid, invalid_value
from gateway.openai.requests.messages import ChatTool, NamedTool
from gateway.openai.requests.schema import ChatBody


def answer_options(body: ChatBody, formats: AnswerFormats) -> AnswerOptions | None:
    """How the answer is parsed, None if all of it is text.

    Raises:
        ApiError: 400, the model cannot call tools, or not as it is asked to.
    """
    reasoning = formats.reasoning or ""
    if not body.tools or body.tool_choice == "none":
        return AnswerOptions("", reasoning) if reasoning else None
    if not formats.describes_tools or formats.calls is None:
        raise _no_tools(formats)
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        given = body.tool_choice if body.tool_choice == "required" else "a tool"
        reason = 'the model decides by itself; give "auto" or "none"'
        raise invalid_value("tool_choice", given, reason)
    for index, tool in enumerate(body.tools):
        if not is_name(tool.function.name, None):
            reason = "a name has letters, digits, and _ . : / -"
            raise invalid_value(f"tools[{index}].function.name", tool.function.name, reason)
    shapes = tuple(map(_shape, body.tools)) if formats.reads_tools(formats.calls) else ()
    return AnswerOptions(formats.calls, reasoning, shapes, body.parallel_tool_calls is not False)


def _no_tools(formats: AnswerFormats) -> ApiError:
    if not formats.describes_tools:
        why = "the model's chat template does not describe tools to it; leave them out, or serve a "
        return invalid("tools", f"tools: {why}model whose template does")
    why = "how this model writes calls is not known; start the gateway with --tool-call-parser, or "
    return invalid("tools", f'tools: {why}give "tool_choice": "none"')


def _shape(tool: ChatTool) -> ToolShape:
    properties = (tool.function.parameters or {}).get("properties")
    given = properties if isinstance(properties, dict) else {}
    strings = tuple(
        name
        for name, schema in given.items()
        if isinstance(schema, dict) and schema.get("type") == "string"
    )
    return ToolShape(tool.function.name, strings)
