"""Answers that must call tools: their grammar, and that what it allows is parsed as calls."""

from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.answers.answer_formats import AnswerFormats
from gateway.answers.events import merged
from gateway.answers.formats import CALL_FORMATS
from gateway.answers.options import AnswerOptions, ToolShape
from gateway.grammars.tool_calls import ToolCalls
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.answers.tool_models import ADD, allows, call_text, demo_tokenizer
from tests.gateway.conftest import Stage, check_error

ARGUMENTS = '{"a": 1, "b": 2}'
NOW = {"type": "function", "function": {"name": "now"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
FAMILIES = [name for name, each in CALL_FORMATS.items() if each.tags is None]
SCHEMA = {"properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("several", [False, True])
def test_the_grammar_allows_what_is_parsed_as_calls(name: str, several: bool) -> None:
    wrapper = CALL_FORMATS[name].wrapper
    grammar = ToolCalls(wrapper, [("add", SCHEMA), ("now", {})], several, {}).grammar()
    call = f'{{"name": "add", "{wrapper.arguments}": {ARGUMENTS}}}'
    one = wrapper.before + call + wrapper.after
    two = wrapper.before + call + wrapper.between + call + wrapper.after
    if wrapper.each:
        two = one + wrapper.between + one
    for text, allowed in ((one, True), (two, several), ("No. " + one, False)):
        assert allows(grammar, text) is allowed, text
    options = AnswerOptions(name, "", (ToolShape("add", ()),))
    parser = AnswerFormats([], {}).parsers(options, "")()
    calls = merged([*parser.feed(two), *parser.finish()]).calls
    assert [(each.name, each.arguments) for each in calls] == [("add", ARGUMENTS)] * 2


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_the_engine_gets_the_grammar_of_a_call(stage: Stage, choice: Any) -> None:
    stage.answer_text(call_text(ARGUMENTS), flag=EndFlag.STOP)
    response = await stage.chat(tools=[ADD, NOW], tool_choice=choice)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls", response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    assert not LLMatcher.validate_grammar(submit.sampling.grammar)
    assert "add" in submit.sampling.grammar
    assert ("now" in submit.sampling.grammar) is (choice == "required")


async def test_required_calls_that_are_not_supported_are_refused(stage: Stage) -> None:
    body: dict[str, Any] = {"tools": [ADD], "tool_choice": "required"}
    check_error(await stage.chat(**body, guided_regex="a"), 400, "tool_choice")
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    error = check_error(await stage.chat(tools=[bad], tool_choice="required"), 400, "tool_choice")
    assert "not" in error["message"]
