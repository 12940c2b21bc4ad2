"""Answers of models whose tokenizers come with response templates, read by transformers."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.answers.answer_formats import MODEL, AnswerFormats, UnknownFormat
from gateway.answers.events import AnswerEvent, merged
from gateway.answers.model_template import read_model_template
from gateway.answers.options import AnswerOptions, ToolShape
from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.answers.tool_models import ADD, allows, call_text, demo_tokenizer
from tests.gateway.conftest import MakeStage, check_error

pytest.importorskip("transformers.utils.chat_parsing")

AB = '{"a": 1, "b": [2, "}"]}'
JSON: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {"close": "<|end|>"},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>to=(?P<tool>\w+)<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{tool}", "arguments": "{content}"},
            },
        },
    },
}
TAGS: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call name=(?P<tool>\w+)>",
            "close": "</call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "repeats": True,
            "transform": {"function": {"name": "{tool}", "arguments": "{content}"}},
        },
    },
}
CASES: dict[str, tuple[dict[str, Any], str, str, str, list[tuple[str, str]]]] = {
    "text": (JSON, "Hello <b>", "Hello <b>", "", []),
    "all": (
        JSON,
        f"<think>\nHm</think>\nSo \n{call_text(AB)}\n{call_text('{a')}",
        "So",
        "Hm",
        [("add", AB), ("add", "{a}")],
    ),
    "no call": (JSON, "See <tool_call>[1]</tool_call>.", "See [1].", "", []),
    "cut off": (JSON, '<tool_call>{"name": "add", "arguments": {"a', "", "", [("add", '{"a')]),
    "channels": (
        CHANNELS,
        "<|channel|>analysis<|message|>Hm<|end|><|channel|>to=add<|message|>" + AB + "<|call|>",
        "",
        "Hm",
        [("add", AB)],
    ),
    "channels without JSON": (
        CHANNELS,
        "<|channel|>to=add<|message|>{a<|call|><|channel|>final<|message|>Yes",
        "{aYes",
        "",
        [],
    ),
    "tags": (
        TAGS,
        "So <call name=add><a>1</a><note>2</note></call>",
        "So",
        "",
        [("add", '{"a": 1, "note": "2"}')],
    ),
}


async def test_calls_in_json_between_fixed_markers_can_be_required(make_stage: MakeStage) -> None:
    stage = await make_stage(tokenizer=demo_tokenizer(response_template=JSON))
    text = f'<tool_call>{{"name": "add", "arguments": {AB}}}</tool_call>'
    stage.answer_text(text, flag=EndFlag.STOP)
    response = await stage.chat(tools=[ADD], tool_choice="required")
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls", response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    assert allows(submit.sampling.grammar, text.replace(AB, '{"a": 1, "b": 2}'))
    assert not allows(submit.sampling.grammar, "No. " + text)


@pytest.mark.parametrize("template", [CHANNELS, TAGS])
async def test_other_calls_cannot_be_required(
    make_stage: MakeStage, template: dict[str, Any]
) -> None:
    stage = await make_stage(tokenizer=demo_tokenizer(response_template=template))
    response = await stage.chat(tools=[ADD], tool_choice="required")
    error = check_error(response, 400, "tool_choice")
    assert "response template does not fix how calls are written" in error["message"]
    assert "--tool-call-parser" in error["message"]


class Source:
    """A tokenizer, of which only this matters."""

    def __init__(self, response_template: Any) -> None:
        self.response_template = response_template


def formats_of(template: dict[str, Any]) -> AnswerFormats:
    model = read_model_template(Source(template))
    assert model is not None
    return AnswerFormats(["{{ tools }}"], {"<|end|>": 3, "<|x|>": 4}, model)


def parsed(template: dict[str, Any], pieces: Sequence[str], end: str = "") -> Any:
    options = AnswerOptions(MODEL, MODEL, (ToolShape("add", ("note",)),))
    parser = formats_of(template).parsers(options, end)()
    events: list[AnswerEvent] = [event for piece in pieces for event in parser.feed(piece)]
    whole = merged([*events, *parser.finish()])
    calls = [(call.name, call.arguments) for call in whole.calls]
    return whole.content, whole.reasoning, calls


@pytest.mark.parametrize("case", CASES)
def test_an_answer_cut_at_any_position_is_the_same(case: str) -> None:
    template, text, *expected = CASES[case]
    for position in range(len(text) + 1):
        assert parsed(template, [text[:position], text[position:]]) == tuple(expected), position
    assert parsed(template, text) == tuple(expected)


def test_reasoning_may_begin_in_the_prompt() -> None:
    prompt = "<think>x</think><|assistant|>old<|user|>Hi<|assistant|><think>\n"
    assert parsed(JSON, ["Hm</think>Yes"], prompt) == ("Yes", "Hm", [])
    assert parsed(JSON, ["Yes"], "no anchor <think>") == ("Yes", "", [])


def test_text_of_calls_is_content_where_calls_are_not_looked_for() -> None:
    parser = formats_of(JSON).parsers(AnswerOptions("", MODEL), "")()
    events = [*parser.feed("<think>Hm</think>" + call_text("{}")), *parser.finish()]
    whole = merged(events)
    assert (whole.reasoning, whole.calls) == ("Hm", ())
    assert whole.content.strip() == call_text("{}")[11:-12].strip()


@pytest.mark.parametrize("template", [None, "text", {}, {"fields": {"content": {"open": ""}}}])
def test_a_template_that_cannot_be_read_is_left_out(template: Any) -> None:
    assert read_model_template(Source(template)) is None


def test_only_special_tokens_of_markers_are_shown() -> None:
    formats = formats_of(JSON)
    assert formats.shown_tokens(AnswerOptions(MODEL, MODEL)) == {"<|end|>": 3}
    assert formats.calls == formats.reasoning == MODEL


def test_a_format_of_another_gateway_is_refused() -> None:
    for name in (MODEL, "other"):
        with pytest.raises(UnknownFormat):
            AnswerFormats([], {}).parsers(AnswerOptions(name, ""), "")


async def test_a_tokenizers_own_template_is_taken(make_stage: MakeStage) -> None:
    stage = await make_stage(tokenizer=demo_tokenizer(response_template=JSON))
    assert stage.model.answers.calls == MODEL
    stage.answer_text(f"<think>Hm</think>{call_text(AB)}")
    message = (await stage.chat(tools=[ADD])).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": AB}
