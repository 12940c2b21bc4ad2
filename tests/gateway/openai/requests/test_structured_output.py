"""Fields that ask for structured output: what the engine is asked for, and what is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from shared.messages.endings import GRAMMAR_FAILED, EndFlag
from shared.messages.requests import Abort, Submit
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.fake_engine import INFO

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"},
        }
    },
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a"'},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
async def test_the_engine_gets_a_grammar_that_compiles(
    stage: Stage, fields: dict[str, Any]
) -> None:
    seen: list[Submit] = []

    def reply(submit: Submit) -> list[int]:
        seen.append(submit)
        return [5]

    stage.answer(reply, flag=EndFlag.STOP)
    for answer in (await stage.complete(**fields), await stage.chat(**fields)):
        assert answer.status_code == 200, answer.text
    for submit in seen:
        assert not LLMatcher.validate_grammar(submit.sampling.grammar)
        assert submit.sampling.grammar


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
async def test_without_such_a_field_there_is_none(stage: Stage, fields: dict[str, Any]) -> None:
    seen: list[Submit] = []

    def reply(submit: Submit) -> list[int]:
        seen.append(submit)
        return [5]

    stage.answer(reply)
    assert (await stage.complete(**fields)).status_code == 200
    assert [submit.sampling.grammar for submit in seen] == [""]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            "only allowed",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "",
        ),
        (
            {"response_format": {"type": "json_object", "more": 1}},
            "response_format.more",
            "",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "give one of"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "give one of",
        ),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex", "unclosed"),
        ({"guided_json": "nonsense"}, "guided_json", "JSON schema"),
        ({"guided_json": "[" * 100_000}, "guided_json", "JSON schema"),
        ({"guided_json": {"not": {}}}, "guided_json", "Unimplemented"),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_choice": [""]}, "guided_choice[0]", ""),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "give one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not with guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "not with guided_regex"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(
    stage: Stage, fields: dict[str, Any], param: str, reason: str
) -> None:
    for answer in (await stage.complete(**fields), await stage.chat(**fields)):
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert reason in error["message"]


async def test_a_worker_that_takes_no_grammars_gets_none(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False)
    model = {"vocab_size": 4096, "max_model_len": 256, "dtype": "float32", "eos_token_ids": (1,)}
    await stage.engine.publish(model=type(INFO.model)("demo", **model))
    await stage.until(lambda: stage.server.service.why_not_ready() is None)
    answer = await stage.complete(guided_regex="a")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "guided_regex: the worker of this model has no structured output"
    )


@pytest.mark.parametrize("more", [{}, {"n": 2}])
async def test_a_text_that_cannot_follow_its_grammar_is_an_error(
    stage: Stage, more: dict[str, Any]
) -> None:
    stage.answer(lambda _: [5, 6], flag=EndFlag.ERROR)
    error = check_error(await stage.complete(guided_regex="a+", **more), 500)
    assert error["message"].endswith(GRAMMAR_FAILED)
    assert not [each for each in stage.engine.received if isinstance(each, Abort)]


async def test_ten_thousand_short_choices_are_accepted(stage: Stage) -> None:
    stage.answer(lambda _: [5], flag=EndFlag.STOP)
    choices = [f"choice {number}" for number in range(10_000)]
    answer = await stage.complete(guided_choice=choices)
    assert answer.status_code == 200, answer.text
    check_error(await stage.complete(guided_choice=[*choices, "x"]), 400, "guided_choice")
    long = [f"{number} {'x' * 40}" for number in range(10_000)]
    error = check_error(await stage.complete(guided_choice=long), 400, "guided_choice")
    assert "at most 262144" in error["message"]
