"""Messages of a body as the input of chat templates."""

import pytest

from gateway.openai.requests.messages import ChatMessage
from gateway.prompts.conversations import conversation
from gateway.prompts.tokenization import PromptReader
from gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizers_for_tests import byte_level

NESTED_LISTS = '{"a":' + 600 * "[" + 600 * "]" + "}"
NESTED_MAPS = 600 * '{"a":' + "1" + 600 * "}"
LONE_SURROGATE = r'{"a":"\ud800"}'


def calling(arguments: str) -> ChatMessage:
    """An assistant's message that calls a function with these arguments."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"a": [1, "x"]}', {"a": [1, "x"]}), ("[1]", "[1]"), ('{"a"', '{"a"'), ("", "")],
)
def test_templates_get_arguments_of_calls_as_maps_if_they_are_json_maps(
    arguments: str, given: object
) -> None:
    [message] = conversation([calling(arguments)]).messages
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": given}


@pytest.mark.parametrize("template", ["{{ messages | tojson }}", "{{ messages[0].content }}<s>"])
@pytest.mark.parametrize("arguments", [NESTED_LISTS, NESTED_MAPS, LONE_SURROGATE])
async def test_arguments_that_are_no_json_for_a_body_are_given_as_text(
    arguments: str, template: str
) -> None:
    message = calling(arguments)
    source = byte_level()
    source.chat_template = template
    reader = PromptReader(Tokenizer(source), 1)
    assert await reader.chat_tokens([message])
    [call] = conversation([message]).messages[0]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    reader.close()
