"""How the answer to a chat is parsed, from the fields of its body."""

from gateway.answers.answer_formats import AnswerFormats
from gateway.answers.call_body import is_name
from gateway.answers.options import AnswerOptions, ToolShape
from gateway.grammars.after_reasoning import AfterReasoning
from gateway.grammars.constraints import JsonSchema, Structure
from gateway.grammars.tool_calls import ToolCalls
from gateway.http.errors import ApiError, invalid, invalid_value
from gateway.openai.requests.messages import ChatTool, NamedTool
from gateway.openai.requests.schema import ChatBody
from gateway.openai.requests.structured_output import constraint_of
from gateway.prompts.prompt import Prompt
from gateway.text.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 32


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
    for index, tool in enumerate(body.tools):
        if not is_name(tool.function.name, None):
            reason = "a name has letters, digits, and _ . : / -"
            raise invalid_value(f"tools[{index}].function.name", tool.function.name, reason)
    shapes = tuple(map(_shape, body.tools)) if formats.reads_tools(formats.calls) else ()
    return AnswerOptions(formats.calls, reasoning, shapes, body.parallel_tool_calls is not False)


def chat_constraint(
    body: ChatBody, answers: AnswerOptions | None, formats: AnswerFormats
) -> tuple[str, Structure] | None:
    """What the answer has to look like, and the field that asks for it; None: anything.

    ``response_format`` is the form of an answer that calls no tools.

    Raises:
        ApiError: 400, fields are not valid or not together, or calls in the model's format cannot
            be asked for.
    """
    found = constraint_of(body)
    if answers is None or not answers.calls:
        return found
    is_of_content = found is not None and found[0].startswith("response_format")
    if body.tool_choice in (None, "auto"):
        if found is None or not is_of_content or not isinstance(found[1], JsonSchema):
            return found
        return found[0], _calls_or_json(body, answers, formats, found[1])
    calls = _required_calls(body, answers, formats)
    if found is not None and not is_of_content:
        reason = f"{found[0]} asks for structured output already; give one"
        raise invalid("tool_choice", f"tool_choice: {reason}")
    return "tool_choice", calls


def _calls_or_json(
    body: ChatBody, answers: AnswerOptions, formats: AnswerFormats, json: JsonSchema
) -> Structure:
    written = formats.written(answers.calls)
    # llguidance's lexer does not tell a call without a marker from other JSON.
    if written is None or not written[0].before:
        return json
    # As without response_format, the model decides what the arguments of other tools are.
    tools = [
        (each.function.name, (each.function.strict and each.function.parameters) or {})
        for each in body.tools or ()
    ]
    ids, (wrapper, tags) = formats.shown_tokens(answers), written
    return ToolCalls(wrapper, tools, answers.parallel, ids, otherwise=json.schema, tags=tags)


def _required_calls(body: ChatBody, answers: AnswerOptions, formats: AnswerFormats) -> ToolCalls:
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    written = formats.written(answers.calls)
    if written is None:
        reason = (
            "the tokenizer's own response template does not fix how calls are written; "
            'give "auto" or "none", or start the gateway with --tool-call-parser'
        )
        raise invalid_value("tool_choice", named or "required", reason)
    tools = [
        (tool.function.name, tool.function.parameters or {})
        for tool in body.tools or ()
        if named in (None, tool.function.name)
    ]
    several = answers.parallel and named is None
    wrapper, tags = written
    return ToolCalls(wrapper, tools, several, formats.shown_tokens(answers), tags=tags)


def behind_reasoning(
    structure: Structure,
    body: ChatBody,
    answers: AnswerOptions | None,
    prompt: Prompt,
    formats: AnswerFormats,
    tokenizer: Tokenizer,
) -> Structure:
    """The structure of an answer, with reasoning before it if the model reasons behind the prompt.

    A model that has a token for the beginning of reasoning decides whether it does.
    """
    known = None if answers is None else formats.reasoning_in(answers)
    if answers is None or known is None:
        return structure
    end = tokenizer.decode(prompt.tokens[-_PROMPT_END_TOKENS:], skip_special=False).rstrip()
    has_begun = end.endswith(known.open)
    may_begin = formats.has_token(known.open) and not end.endswith(known.close)
    if not has_begun and (not may_begin or body.continue_final_message):
        return structure
    return AfterReasoning(structure, known, has_begun, formats.shown_tokens(answers))


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
