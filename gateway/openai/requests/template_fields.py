"""The fields of a chat that concern its chat template."""

import json
from collections.abc import Callable
from typing import Any, Literal

from gateway.http.errors import invalid, invalid_value
from gateway.openai.requests.schema import ChatBody, ChatMessages
from gateway.prompts.template_options import TemplateOptions, is_variable, text_that_opens
from gateway.text.tokenizer import Tokenizer

_MAX_VARIABLES = 64
_MAX_CHARS = 16 * 2**10
_FIELD = "chat_template_kwargs"


def template_options(body: ChatMessages, tokenizer: Tokenizer) -> TemplateOptions:
    """How a body's conversation is rendered.

    Raises:
        ApiError: 400, the template cannot be used like this.
    """
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    if continues:
        if begins:
            reason = "not with continue_final_message: no answer begins then"
            raise invalid_value("add_generation_prompt", True, reason)
        last = body.messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            reason = "the last message must be the assistant's, with text and without tool_calls"
            raise invalid_value("continue_final_message", True, reason)
    variables = dict(body.chat_template_kwargs or {})
    _check_variables(variables, tokenizer.control_edges)
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables = effort_variables(body.reasoning_effort, tokenizer.template_reads) | variables
    return TemplateOptions(not continues if begins is None else begins, continues, variables)


def effort_variables(
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    template_reads: Callable[[str], bool],
) -> dict[str, Any]:
    """Variables by which a template is given an effort; none, if it does not know any.

    Agents send an effort to every model. To refuse it would only keep them away.
    """
    if template_reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if template_reads("enable_thinking"):
        return {"enable_thinking": effort != "none"}
    return {}


def _check_variables(variables: dict[str, Any], edges: frozenset[str]) -> None:
    if len(variables) > _MAX_VARIABLES:
        raise invalid(_FIELD, f"{_FIELD}: {len(variables)} keys; at most {_MAX_VARIABLES}")
    for name, value in variables.items():
        if not is_variable(name):
            reason = "a variable of a chat template that the server sets itself, or no name of one"
            raise invalid_value(f"{_FIELD}.{name[:64]}", value, reason)
        text = text_that_opens(value, edges)
        if text is not None:
            reason = "special tokens of this model begin or end with one of its characters"
            raise invalid_value(f"{_FIELD}.{name}", text, reason)
    try:
        num_chars = len(json.dumps(variables))
    except RecursionError:
        raise invalid(_FIELD, f"{_FIELD}: nested too deeply") from None
    if num_chars > _MAX_CHARS:
        raise invalid(_FIELD, f"{_FIELD}: {num_chars} characters of JSON; at most {_MAX_CHARS}")
