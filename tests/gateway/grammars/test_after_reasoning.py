"""Structure of answers of models that reason first."""

from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.answers.formats import REASONING_FORMATS
from gateway.grammars.after_reasoning import AfterReasoning
from gateway.grammars.constraints import Choices, Grammar, JsonSchema, Regex, Structure
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.answers.tool_models import (
    ADD,
    allows,
    call_text,
    demo_tokenizer,
    grammar_tokenizer,
)
from tests.gateway.conftest import MakeStage, Stage
from tests.support.tool_template import HERMES

THINK = REASONING_FORMATS["think"]
NUMBER = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
JSON = '{"a": 1}'
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
REASONS = HERMES.replace("'<|assistant|>'", "'<|assistant|><think>\\n'")
CALL = call_text('{"a": 1, "b": 2}')


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer(REASONS)


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (JsonSchema(NUMBER), JSON),
        (Regex("a+/b"), "aa/b"),
        (Choices(["yes", "no"]), "yes"),
        (Grammar('start: "x" N\nN: /[0-9]+/'), "x12"),
        (Grammar('root ::= "x" [0-9]+'), "x12"),
    ],
)
def test_reasoning_is_free_and_what_follows_is_structured(structure: Structure, text: str) -> None:
    begun = AfterReasoning(structure, THINK, True, {}).grammar()
    for thoughts in ("", "Hm, <b> {}\n", "I <think>", "日本"):
        for between in ("", "\n", "\n\n"):
            assert allows(begun, f"{thoughts}</think>{between}{text}")
    assert not allows(begun, text)
    assert not allows(begun, f"Hm.</think>Well: {text}")
    assert not allows(begun, f"Hm.</think>\n\n\n{text}")
    free = AfterReasoning(structure, THINK, False, {}).grammar()
    assert allows(free, text)
    assert allows(free, f"<think>\nHm.\n</think>\n\n{text}")
    assert not allows(free, f"Hm.</think>{text}")


def test_markers_that_are_special_tokens_are_tokens() -> None:
    ids = {THINK.open: 3, THINK.close: 4}
    tokenizer = grammar_tokenizer()
    for has_begun in (False, True):
        grammar = AfterReasoning(JsonSchema(NUMBER), THINK, has_begun, ids).grammar()
        for thoughts in ("", "Hm. </think>"):
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            before = [] if has_begun else [3]
            text = [*before, *tokenizer.tokenize_str(thoughts), 4, *tokenizer.tokenize_str(JSON)]
            assert matcher.consume_tokens(text)
            assert matcher.is_accepting()


async def grammar_of(stage: Stage, answer: str, **fields: Any) -> tuple[str, Any]:
    """The grammar that the engine gets for a chat, and the choice that its client gets."""
    stage.answer_text(answer, flag=EndFlag.STOP)
    response = await stage.chat(**fields)
    assert response.status_code == 200, response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    return submit.sampling.grammar, response.json()["choices"][0]


async def test_a_call_that_is_required_comes_after_reasoning(stage: Stage) -> None:
    answer = f"Sum them.</think>\n{CALL}"
    grammar, choice = await grammar_of(stage, answer, tools=[ADD], tool_choice="required")
    assert allows(grammar, answer)
    assert not allows(grammar, CALL)
    assert not allows(grammar, "Sum them.</think>No.")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Sum them."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2}'


async def test_json_comes_after_reasoning(stage: Stage) -> None:
    answer = f"One.</think>\n\n{JSON}"
    grammar, choice = await grammar_of(stage, answer, response_format=JSON_FORMAT)
    assert allows(grammar, answer)
    assert not allows(grammar, JSON)
    assert choice["message"]["content"] == JSON
    assert choice["message"]["reasoning_content"] == "One."


async def test_a_model_with_a_token_for_reasoning_decides_whether_it_reasons(
    make_stage: MakeStage,
) -> None:
    """Others do not: the marker would be one more text that the grammar makes likely."""
    for special, may_reason in (((), False), (("<think>", "</think>"), True)):
        stage = await make_stage(tokenizer=demo_tokenizer(special=special))
        grammar, _ = await grammar_of(stage, JSON, response_format=JSON_FORMAT)
        assert ("@answer" in grammar) is may_reason
