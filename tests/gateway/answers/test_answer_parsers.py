"""Answers in the formats of families of models become content, reasoning and calls."""

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answers.answer_formats import AnswerFormats
from gateway.answers.events import AnswerEvent, CallBegun, CallEnded, merged
from gateway.answers.formats import CALL_FORMATS, REASONING_FORMATS
from gateway.answers.options import AnswerOptions, ToolShape
from gateway.answers.parser_names import AUTO, CALL_CHOICES, NONE, REASONING_CHOICES

TOOLS = (ToolShape("now", ()), ToolShape("add", ("note",)))
AB = '{"a": 1, "b": [2, "}"]}'
# By case: format, text, content, reasoning, and the calls with their arguments.
Call = tuple[str, str]
CASES: dict[str, tuple[str, str, str, str, list[Call]]] = {
    "text alone": ("hermes", " Hello, <b>world</b> \n", " Hello, <b>world</b> \n", "", []),
    "one call": (
        "hermes",
        f'<tool_call>\n{{"name": "add", "arguments": {AB}}}\n</tool_call>',
        "",
        "",
        [("add", AB)],
    ),
    "text and two calls": (
        "hermes",
        f'Let me see. \n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {AB}, "name": "add"}}</tool_call>',
        "Let me see.",
        "",
        [("now", "{}"), ("add", AB)],
    ),
    "reasoning, text and a call": (
        "hermes",
        '<think>\nI <tool_call> it.\n</think>\n\nWell:\n<tool_call>\n{"name": "now"}\n</tool_call>',
        "Well:",
        "I <tool_call> it.",
        [("now", "{}")],
    ),
    "arguments that are no JSON": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {a: 1,, "b}}</tool_call>',
        "",
        "",
        [("add", '{a: 1,, "b}}')],
    ),
    "arguments as a string": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        "",
        "",
        [("add", '{"a": "é"}')],
    ),
    "a brace is missing": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> done',
        "done",
        "",
        [("add", '{"a": 1}')],
    ),
    "a brace too many": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>',
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    "no call between the markers": (
        "hermes",
        "See <tool_call>{'name': 1}</tool_call> there",
        "See <tool_call>{'name': 1}</tool_call> there",
        "",
        [],
    ),
    "nothing between the markers": (
        "hermes",
        "See <tool_call></tool_call>!",
        "See <tool_call></tool_call>!",
        "",
        [],
    ),
    "an object without a name": (
        "hermes",
        '<tool_call>{"city": {"name": "x"}}</tool_call>',
        '<tool_call>{"city": {"name": "x"}}</tool_call>',
        "",
        [],
    ),
    "cut off in the arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "x\\',
        "",
        "",
        [("add", '{"a": "x\\')],
    ),
    "cut off in the name": (
        "hermes",
        'A <tool_call>{"name": "ad',
        'A <tool_call>{"name": "ad',
        "",
        [],
    ),
    "cut off in a marker": ("hermes", "A <tool_ca", "A <tool_ca", "", []),
    "cut off behind the arguments' key": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}, "na',
        "",
        "",
        [("add", "{}")],
    ),
    "cut off in reasoning": ("hermes", "<think>Hm. ", "", "Hm. ", []),
    "reasoning's marker in the text": (
        "hermes",
        "Use <think>x</think>",
        "Use <think>x</think>",
        "",
        [],
    ),
    "Llama's call": (
        "llama3",
        f'{{"name": "add", "parameters": {AB}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        "",
        [("add", AB), ("now", "{}")],
    ),
    "Llama's call behind its tag": (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {AB}}}',
        "",
        "",
        [("add", AB)],
    ),
    "an object that names no tool": (
        "llama3",
        '{"name": "Ada", "parameters": 3}',
        '{"name": "Ada", "parameters": 3}',
        "",
        [],
    ),
    "an object with other keys": ("llama3", ' {"answer": 3} <', '{"answer": 3} <', "", []),
    "Llama's code": ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", []),
    "Mistral's list": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "add", "arguments": {AB}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        "",
        [("add", AB), ("now", "{}")],
    ),
    "Mistral's names": (
        "mistral",
        f"[THINK]Hm[/THINK]Now[TOOL_CALLS]add[ARGS]{AB}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{{}}",
        "Now",
        "Hm",
        [("add", AB), ("now", "{}")],
    ),
    "a name with its arguments": ("mistral", f"[TOOL_CALLS]add{AB}", "", "", [("add", AB)]),
    "no name": ("mistral", "[TOOL_CALLS] I call it", "[TOOL_CALLS] I call it", "", []),
    "another mark": ("mistral", "[TOOL_CALLS]a[OTHER]{}", "[TOOL_CALLS]a[OTHER]{}", "", []),
    "text behind the arguments": (
        "mistral",
        f"[TOOL_CALLS]add[ARGS]{AB} So",
        "So",
        "",
        [("add", AB)],
    ),
    "Phi's list": (
        "phi4",
        f'<|tool_call|>[{{"name": "add", "arguments": {AB}}}]<|/tool_call|>',
        "",
        "",
        [("add", AB)],
    ),
    "Granite's list": (
        "granite",
        f'<|tool_call|>[{{"name": "add", "arguments": {AB}}}]',
        "",
        "",
        [("add", AB)],
    ),
    "GLM's tags": (
        "glm",
        "<think></think>\nSo\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>2\n</arg_value>\n</tool_call><tool_call>now</tool_call>",
        "So",
        "",
        [("add", '{"a": 1, "note": "2\\n"}'), ("now", "{}")],
    ),
    "GLM's tags, cut off": (
        "glm",
        "<tool_call>add<arg_key>a</arg_key><arg_value>[1",
        "",
        "",
        [("add", '{"a": "[1"')],
    ),
    "no call in GLM's markers": (
        "glm",
        "<tool_call>a b</tool_call>",
        "<tool_call>a b</tool_call>",
        "",
        [],
    ),
    "Qwen's tags": (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n[1, 2]\n</parameter>\n<parameter=note>\n"
        "x\n<y>\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("add", '{"a": [1, 2], "note": "x\\n<y>"}')],
    ),
    "no function in Qwen's markers": (
        "qwen3_coder",
        "<tool_call>x<function=add></tool_call>",
        "<tool_call>x<function=add></tool_call>",
        "",
        [],
    ),
}
ALPHABET = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "<parameter=", ">"),
    *(
        '{"name": "add", ',
        '"arguments": ',
        '{"a": 1}',
        "}",
        "{",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        "<",
        "x",
    ),
    *(" ", "\n", "now", "</parameter>", "[CALL_ID]", "add", '"x"', "</"),
]


def options_of(name: str) -> AnswerOptions:
    return AnswerOptions(name, "mistral" if name == "mistral" else "think", TOOLS)


def parsed(name: str, pieces: Sequence[str], prompt_end: str = "") -> list[AnswerEvent]:
    parser = AnswerFormats([], {}).parsers(options_of(name), prompt_end)()
    found = [event for piece in pieces for event in parser.feed(piece)]
    return [*found, *parser.finish()]


def shown(events: Sequence[AnswerEvent]) -> tuple[str, str, list[Call]]:
    whole = merged(events)
    calls = [(call.name or "", call.arguments) for call in whole.calls]
    return whole.content, whole.reasoning, calls


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_parsed(case: str) -> None:
    name, text, content, reasoning, calls = CASES[case]
    events = parsed(name, [text])
    assert shown(events) == (content, reasoning, calls)
    begun = [event.index for event in events if isinstance(event, CallBegun)]
    ended = [event.index for event in events if isinstance(event, CallEnded)]
    assert begun == ended == list(range(len(calls)))


@pytest.mark.parametrize("case", CASES)
def test_an_answer_cut_at_any_position_is_the_same(case: str) -> None:
    name, text, *expected = CASES[case]
    for position in range(len(text) + 1):
        assert shown(parsed(name, [text[:position], text[position:]])) == tuple(expected)
    assert shown(parsed(name, text)) == tuple(expected)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3", "mistral", "glm", "qwen3_coder", "granite"]),
    st.lists(st.sampled_from(ALPHABET), max_size=14).map("".join),
    st.integers(0, 2**32),
)
def test_any_text_is_parsed_alike_however_it_is_cut(name: str, text: str, seed: int) -> None:
    whole = shown(parsed(name, [text]))
    assert shown(parsed(name, text)) == whole
    cuts = sorted(random.Random(seed).randrange(len(text) + 1) for _ in range(3))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(parsed(name, pieces)) == whole


@pytest.mark.parametrize("case", CASES)
def test_what_was_shown_stays(case: str) -> None:
    """The events of a text begin those of every longer text: a stream takes nothing back."""
    name, text, *_ = CASES[case]
    parser = AnswerFormats([], {}).parsers(options_of(name), "")()
    before: tuple[str, str, list[Call]] = ("", "", [])
    found: list[AnswerEvent] = []
    for char in text:
        found += parser.feed(char)
        now = shown(found)
        assert now[0].startswith(before[0])
        assert now[1].startswith(before[1])
        for (name_now, arguments), (name_before, earlier) in zip(now[2], before[2], strict=False):
            assert name_now == name_before
            assert arguments.startswith(earlier)
        before = now


def test_settings_name_all_formats() -> None:
    assert set(CALL_CHOICES) == {AUTO, NONE, *CALL_FORMATS}
    assert set(REASONING_CHOICES) == {AUTO, NONE, *REASONING_FORMATS}


def test_arguments_are_shown_while_they_arrive() -> None:
    parser = AnswerFormats([], {}).parsers(options_of("hermes"), "")()
    parser.feed('<tool_call>{"name": "add", "arguments": ')
    pieces = [merged(parser.feed(char)).calls for char in '{"a": "x y"}']
    assert [call.arguments for calls in pieces for call in calls] == list('{"a": "x y"}')


def test_reasoning_that_the_prompt_begins_needs_no_marker() -> None:
    events = parsed("hermes", ["Hm.</think>\n\nYes"], prompt_end="<|assistant|><think>\n")
    assert shown(events) == ("Yes", "Hm.", [])
    events = parsed("hermes", ["Yes"], prompt_end="<think>\n\n</think>\n\n")
    assert shown(events) == ("Yes", "", [])


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3"])
def test_long_arguments_are_parsed_in_linear_time(name: str) -> None:
    arguments = json.dumps({"text": 'a"<b' * 50_000})
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": ""}[name]
    text = f'{before}{{"name": "add", "arguments": {arguments}}}'
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    assert shown(parsed(name, pieces)) == ("", "", [("add", arguments)])
