"""What compiles to a grammar, and the reasons why other things do not."""

import asyncio
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.compiler import MAX_BYTES, GrammarCompiler
from gateway.grammars.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from gateway.http.errors import ApiError

TOKENIZER = (Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json").read_text()

_NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "required": ["next"],
    "additionalProperties": False,
}
_LIST = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: TOKENIZER)
    yield made
    made.close()


def compile_(compiler: GrammarCompiler, constraint: Constraint, num_prompts: int = 1) -> str:
    return asyncio.run(compiler.compile("caller", "field", constraint, num_prompts))


def takes(grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's."""
    tokenizer = LLTokenizer(TOKENIZER)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text))) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Regex("[a-c]+"), "abc", "abd"),
        (Choices(["yes", 'no "really"', "é\n"]), 'no "really"', "no"),
        (Choices(["yes", "yes please"]), "yes please", "please"),
        (Grammar('start: "a" N\nN: /[0-9]+/'), "a12", "a"),
        (Grammar('root ::= "a" [0-9]+'), "a12", "a"),
        (JsonSchema({"type": "object"}), '{"a": {"b": [1, 2]}}', "[]"),
        (JsonSchema({"type": "object"}), '{\n  "a": 1\n}', '{\n\n"a": 1}'),
        (JsonSchema({"enum": [1, "a"]}), '"a"', "2"),
        (JsonSchema(_LIST | {"$defs": {"node": _NODE}}), "null", "1"),
    ],
)
def test_texts_of_a_grammar(
    compiler: GrammarCompiler, constraint: Constraint, good: str, bad: str
) -> None:
    grammar = compile_(compiler, constraint)
    assert takes(grammar, good)
    assert not takes(grammar, bad)
    assert compile_(compiler, constraint) == grammar


def test_choices_are_texts_whatever_their_characters(compiler: GrammarCompiler) -> None:
    texts = [
        *string.punctuation,
        " ",
        "\n",
        "\\d",
        "a.c",
        "[x]{2}",
        "(?i)",
        "^$",
        "é",
        "日本",
        "\x7f",
    ]
    grammar = compile_(compiler, Choices(texts))
    for text in texts:
        assert takes(grammar, text), text
    assert not takes(grammar, "abc")
    assert not takes(grammar, "5")


def test_ten_thousand_choices_are_one_grammar(compiler: GrammarCompiler) -> None:
    grammar = compile_(compiler, Choices([f"choice {number:05}" for number in range(10_000)]))
    assert takes(grammar, "choice 09999")
    assert not takes(grammar, "choice 10000")


def test_whitespace_is_bounded(compiler: GrammarCompiler) -> None:
    grammar = compile_(compiler, JsonSchema({"type": "array"}))
    assert takes(grammar, "[1, 2]")
    assert takes(grammar, "[\n    1,\n    2\n]")
    assert not takes(grammar, "[ " + " " * 20 + "1]")
    assert not takes(grammar, "[\n\n1]")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Regex("(["), "unclosed character class"),
        (Regex("(?=a)b"), "look-ahead"),
        (Grammar("start: x"), 'unknown name: "x"'),
        (Grammar("root ::= ("), "no GBNF"),
        (Regex(r"[^\s\S]"), "no text satisfies it"),
        (JsonSchema({"type": "nope"}), "Invalid type: nope"),
        (JsonSchema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (JsonSchema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 1}), "greater than maximum"),
        (JsonSchema({"$ref": "http://127.0.0.1:9/x.json"}), "does not fetch resources"),
        (JsonSchema({"$ref": "#/$defs/none"}), "does not exist"),
        (JsonSchema({"$ref": "#"}), "recurses without end"),
        (JsonSchema(_NODE | {"$defs": {"node": _NODE}}), "recurses without end"),
        (JsonSchema(nested(100)), "recursion limit"),
        (JsonSchema(nested(5_000)), "deep"),
        (JsonSchema({"enum": ["x" * MAX_BYTES]}), f"at most {MAX_BYTES}"),
        (JsonSchema({"const": "\ud800"}), ""),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(ApiError, match=r"^field: ") as raised:
        compile_(compiler, constraint)
    assert raised.value.status == 400
    assert raised.value.param == "field"
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_grammar_that_takes_too_long_ends_only_itself(compiler: GrammarCompiler) -> None:
    endless = Grammar("start: A\nA: /.*a.{20}/ & /.*b.{19}/ & ~/.*c.{18}/")
    for _ in range(3):  # more often than there are processes
        with pytest.raises(ApiError, match="takes more than 1 s of CPU time or too much memory"):
            compile_(compiler, endless)
    assert compile_(compiler, Regex("a+"))


def test_the_grammars_of_all_prompts_are_bounded_together(compiler: GrammarCompiler) -> None:
    large = JsonSchema({"enum": ["x" * (MAX_BYTES // 2)]})
    compile_(compiler, large, num_prompts=8)
    with pytest.raises(ApiError, match="each of 128 prompts"):
        compile_(compiler, large, num_prompts=128)


def test_without_a_tokenizer_there_is_no_structured_output() -> None:
    with pytest.raises(ApiError, match="field: this model's tokenizer"):
        compile_(GrammarCompiler(None), Regex("a"))


def test_what_is_remembered_is_bounded() -> None:
    compiler = GrammarCompiler(lambda: TOKENIZER)
    for number in range(100):
        compile_(compiler, JsonSchema({"enum": [number, "x" * (MAX_BYTES - 1_000)]}))
    held = sum(len(grammar) for grammar in compiler._compiled)
    assert held == compiler._num_bytes
    assert held < 5 * 2**20
    assert json.loads(next(reversed(compiler._compiled)))
    compiler.close()
