"""Calls with tags around each argument: what their grammar allows is parsed as valid calls."""

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher

from gateway.answers.answer_formats import AnswerFormats
from gateway.answers.events import merged
from gateway.answers.formats import CALL_FORMATS
from gateway.answers.options import AnswerOptions, ToolShape
from gateway.grammars.tool_calls import ToolCalls
from tests.gateway.answers.tool_models import allows, grammar_tokenizer

FORMATS = ("glm", "qwen3_coder")
CITY = {"type": "string", "minLength": 2, "maxLength": 9}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["°C", "K", "<F>"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$", "maxLength": 6},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"], "maxLength": 5},
    },
    "required": ["city", "days", "code"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    },
}
STRINGS = ("city", "unit", "code")
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>code</arg_key>\n<arg_value>AB/1</arg_value>\n</tool_call>"
)
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=code>\nAB/1\n</parameter>\n"
    "</function>\n</tool_call>"
)


def grammar_of(name: str, schema: Any, several: bool = False, tool: str = "weather") -> str:
    known = CALL_FORMATS[name]
    tags, tools = known.tags, [(tool, schema), ("now", {"additionalProperties": False})]
    return ToolCalls(known.wrapper, tools, several, {}, tags=tags).grammar()


def parsed(name: str, text: str) -> list[tuple[str | None, Any]]:
    options = AnswerOptions(name, "", (ToolShape("weather", STRINGS),))
    parser = AnswerFormats([], {}).parsers(options, "")()
    found = merged([*parser.feed(text), *parser.finish()])
    assert not found.content
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def drawn(grammar: str, seed: int) -> str:
    """A text that the grammar allows, token by token at random."""
    tokenizer, draw, tokens = grammar_tokenizer(), random.Random(seed), list[int]()
    matcher, end = LLMatcher(tokenizer, grammar, log_level=0), tokenizer.eos_token
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        ends = end in allowed and draw.random() < 0.5
        tokens.append(end if ends else draw.choice(allowed))
        assert matcher.consume_token(tokens[-1])
        assert len(tokens) < 1_000
    return tokenizer.decode_str([each for each in tokens if each != end])


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_the_grammar_allows_is_parsed_as_valid_calls(name: str) -> None:
    grammar = grammar_of(name, PARAMETERS, several=True)
    tools = set()
    for seed in range(40):
        text = drawn(grammar, seed)
        calls = parsed(name, text)
        assert calls
        for tool, arguments in calls:
            tools.add(tool)
            if tool == "weather":
                jsonschema_rs.validate(PARAMETERS, arguments)
            else:
                assert arguments == {}
    assert tools == {"weather", "now"}


@pytest.mark.parametrize(("name", "text"), [("glm", GLM), ("qwen3_coder", QWEN)])
def test_calls_as_the_models_write_them_are_allowed(name: str, text: str) -> None:
    grammar = grammar_of(name, PARAMETERS)
    for city in ("Oslo", "a\nb", '"x"', "<b>", "\n x"):
        assert allows(grammar, text.format(city)), city
        [(tool, arguments)] = parsed(name, text.format(city))
        assert (tool, arguments) == ("weather", {"city": city, "days": 3, "code": "AB/1"})
    for city in ("O", "too long a name", "</parameter>", "</arg_value>x"):
        if "</" not in city or CALL_FORMATS[name].tags.value[1] in city:  # type: ignore[union-attr]
            assert not allows(grammar, text.format(city)), city
    assert not allows(grammar, text.format("Oslo").replace("3", "33"))
    assert not allows(grammar, text.format("Oslo") + "\n" + text.format("Oslo"))
    assert allows(
        grammar_of(name, PARAMETERS, several=True), text.format("Oslo") + "\n" + text.format("Rome")
    )
    assert not allows(grammar, "No. " + text.format("Oslo"))


def test_glm_may_leave_out_line_ends() -> None:
    assert allows(grammar_of("glm", PARAMETERS), GLM.format("Oslo").replace("\n", ""))


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_without_parameters_takes_any(name: str) -> None:
    text = {"glm": GLM, "qwen3_coder": QWEN}[name].format("x</b>")
    assert allows(grammar_of(name, {}), text)
    assert not allows(grammar_of(name, {"additionalProperties": False}), text)


def test_special_tokens_among_the_tags_are_tokens() -> None:
    known, ids = CALL_FORMATS["glm"], {"<tool_call>": 5, "</arg_value>": 6, "</tool_call>": 7}
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    call = ToolCalls(known.wrapper, [("f", schema)], False, ids, tags=known.tags)
    matcher = LLMatcher(grammar_tokenizer(), call.grammar(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = grammar_tokenizer().tokenize_str("f\n<arg_key>city</arg_key>\n<arg_value>Oslo")
    assert matcher.consume_tokens([5, *text, 6, 7])
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf' of the parameters of 'weather'"),
        ({"properties": {"<a>": {}}}, "'<a>' cannot stand between tags"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "has none"),
    ],
)
def test_what_tags_cannot_express_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        grammar_of("glm", schema)
