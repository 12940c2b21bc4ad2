"""Answers that are asked for JSON and may call tools instead."""

from typing import Any

import pytest

from gateway.answers.formats import CALL_FORMATS
from gateway.grammars.tool_calls import ToolCalls
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.answers.tool_models import ADD, allows, call_text, demo_tokenizer
from tests.gateway.conftest import MakeStage, Stage, check_error

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
OSLO = '{"city": "Oslo"}'
FAMILIES = [name for name, each in CALL_FORMATS.items() if each.wrapper.before and not each.tags]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


async def grammar_of(stage: Stage, **fields: Any) -> str:
    """The grammar that the engine gets for a chat."""
    stage.answer_text(OSLO, flag=EndFlag.STOP)
    response = await stage.chat(**fields)
    assert response.status_code == 200, response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    return submit.sampling.grammar


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grammar_allows_calls_or_the_json_and_nothing_else(name: str) -> None:
    wrapper = CALL_FORMATS[name].wrapper
    grammar = ToolCalls(wrapper, [("add", {})], False, {}, otherwise=CITY).grammar()
    call = f'{{"name": "add", "{wrapper.arguments}": {{"any": [1]}}}}'
    assert allows(grammar, wrapper.before + call + wrapper.after)
    assert allows(grammar, OSLO)
    assert not allows(grammar, '{"city": "Paris"}')
    assert not allows(grammar, "No. " + OSLO)


async def test_tools_and_a_response_format_allow_calls_or_the_json(stage: Stage) -> None:
    grammar = await grammar_of(stage, tools=[ADD], response_format=CITY_FORMAT)
    assert allows(grammar, OSLO)
    assert allows(grammar, call_text('{"a": 1}'))
    assert allows(grammar, call_text("{}") + "\n" + call_text("{}"))
    assert not allows(grammar, "So: " + call_text("{}"))


async def test_arguments_of_strict_tools_follow_their_parameters(stage: Stage) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = await grammar_of(stage, tools=[strict], response_format=CITY_FORMAT)
    assert allows(grammar, call_text('{"a": 1, "b": 2}'))
    assert not allows(grammar, call_text('{"a": 1}'))
    assert allows(grammar, OSLO)


async def test_the_answer_is_shown_as_what_it_is(make_stage: MakeStage) -> None:
    for text, reason in ((OSLO, "stop"), (call_text('{"a": 1}'), "tool_calls")):
        stage = await make_stage()
        stage.answer_text(text, flag=EndFlag.STOP)
        response = await stage.chat(tools=[ADD], response_format=CITY_FORMAT)
        [choice] = response.json()["choices"]
        assert choice["finish_reason"] == reason
        assert (choice["message"]["content"] == OSLO) is (reason == "stop")


async def test_in_a_format_without_markers_the_answer_is_the_json(make_stage: MakeStage) -> None:
    template = "{{ tools }}<|python_tag|>{{ messages }}"
    stage = await make_stage(tokenizer=demo_tokenizer(template), tool_call_parser="llama3")
    grammar = await grammar_of(stage, tools=[ADD], response_format=CITY_FORMAT)
    assert allows(grammar, OSLO)
    assert not allows(grammar, '{"name": "add", "parameters": {}}')


async def test_without_parallel_calls_there_is_one(stage: Stage) -> None:
    fields = {"parallel_tool_calls": False, "response_format": {"type": "json_object"}}
    grammar = await grammar_of(stage, tools=[ADD], **fields)
    assert allows(grammar, '{"any": 1}')
    assert allows(grammar, call_text("{}"))
    assert not allows(grammar, call_text("{}") + "\n" + call_text("{}"))


async def test_required_calls_come_before_the_response_format(stage: Stage) -> None:
    fields = {"tool_choice": "required", "response_format": CITY_FORMAT}
    grammar = await grammar_of(stage, tools=[ADD], **fields)
    assert allows(grammar, call_text('{"a": 1, "b": 2}'))
    assert not allows(grammar, OSLO)


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "none", "response_format": CITY_FORMAT}, {"guided_json": CITY}],
)
async def test_tools_that_are_not_to_be_called_leave_the_json(
    stage: Stage, fields: dict[str, Any]
) -> None:
    grammar = await grammar_of(stage, tools=[ADD], **fields)
    assert allows(grammar, OSLO)
    assert not allows(grammar, call_text("{}"))


async def test_a_schema_that_cannot_be_compiled_is_refused_beside_tools_too(stage: Stage) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    check_error(await stage.chat(tools=[ADD], response_format=given), 400, "response_format")
