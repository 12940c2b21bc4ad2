"""Whatever is wrong with a request is answered in OpenAI's format, by name, and nothing else."""

import json
from typing import Any

import pytest

from gateway.openai.requests.messages import MAX_PARTS
from gateway.openai.requests.schema import MAX_MESSAGES, MAX_PROMPTS
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.fake_engine import kv_pool

VALUES: list[tuple[str, str]] = [
    # (field, JSON)
    ("max_tokens", "0"),
    ("max_tokens", "-1"),
    ("max_tokens", "true"),
    ("max_tokens", '"5"'),
    ("max_tokens", "1.5"),
    ("max_tokens", "1e309"),
    ("max_tokens", "NaN"),
    ("max_tokens", "[]"),
    ("max_tokens", "1" + "0" * 30),
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "1e309"),
    ("temperature", "-0.1"),
    ("temperature", "2.1"),
    ("temperature", "true"),
    ("temperature", '"1"'),
    ("top_p", "1.01"),
    ("top_p", "-1"),
    ("top_k", "-2"),
    ("top_k", "true"),
    ("top_k", "4294967296"),
    ("min_p", "2"),
    ("min_p", "-0.5"),
    ("seed", "-9223372036854775809"),
    ("seed", "9223372036854775808"),
    ("seed", "1.5"),
    ("stop", '""'),
    ("stop", "5"),
    ("stop", '["a", 5]'),
    ("stop", json.dumps(["a"] * 17)),
    ("stop", json.dumps("a" * 1025)),
    ("stop_token_ids", "[4096]"),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[true]"),
    ("stop_token_ids", '"5"'),
    ("ignore_eos", "1"),
    ("ignore_eos", '"yes"'),
    ("min_tokens", "-1"),
    ("min_tokens", "17"),
    ("stream", "1"),
    ("stream", '"true"'),
    ("stream_options", '{"include_usage": true}'),
    ("return_token_ids", "1"),
    ("user", "5"),
    ("n", "true"),
    ("n", "0"),
    ("n", "129"),
    ("n", "1.5"),
    ("best_of", "0"),
    ("best_of", "129"),
    ("best_of", "true"),
    ("priority", "2147483648"),
    ("priority", "-2147483649"),
    ("priority", "0.5"),
    ("priority", '"high"'),
    ("cache_salt", "5"),
    ("cache_salt", json.dumps("a" * 257)),
    ("frequency_penalty", "2.1"),
    ("frequency_penalty", '"0.5"'),
    ("presence_penalty", "-2.1"),
    ("presence_penalty", "true"),
    ("presence_penalty", "NaN"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "-1"),
    ("repetition_penalty", "100.5"),
    ("repetition_penalty", "1e309"),
    ("logit_bias", "[]"),
    ("logit_bias", '{"4096": 1}'),
    ("logit_bias", '{"4096": 0}'),
    ("logit_bias", '{"-1": 1}'),
    ("logit_bias", '{"05": 1}'),
    ("logit_bias", '{"5.0": 1}'),
    ("logit_bias", '{"the": 1}'),
    ("logit_bias", '{"": 1}'),
    ("logit_bias", '{"99999999999999999999": 1}'),
    ("logit_bias", '{"5": 100.5}'),
    ("logit_bias", '{"5": -101}'),
    ("logit_bias", '{"5": NaN}'),
    ("logit_bias", '{"5": "1"}'),
    ("logit_bias", '{"5": null}'),
    ("logit_bias", '{"5": true}'),
    ("logit_bias", '{"5": 1' + "0" * 400 + "}"),
    ("logit_bias", json.dumps({str(token): 1 for token in range(301)})),
    ("response_format", '{"type": "json"}'),
    ("response_format", '"json_object"'),
    ("use_beam_search", "1"),
    ("use_beam_search", '"true"'),
    ("length_penalty", "NaN"),
    ("length_penalty", "-Infinity"),
    ("length_penalty", "1e309"),
    ("length_penalty", "100.5"),
    ("length_penalty", "-101"),
    ("length_penalty", "true"),
    ("length_penalty", '"1"'),
    ("length_penalty", "0.5"),  # without a beam search
    ("early_stopping", "1"),
    ("early_stopping", '"always"'),
    ("early_stopping", "[]"),
    ("early_stopping", "true"),  # without a beam search
    ("early_stopping", '"never"'),
    ("service_tier", '"priority"'),
    ("metadata", "[]"),
    ("store", "1"),
    ("prompt_cache_key", "5"),
    ("parallel_tool_calls", '"no"'),
    ("skip_special_tokens", "false"),
    ("include_stop_str_in_output", "1"),
    ("spaces_between_special_tokens", '"no"'),
    ("truncate_prompt_tokens", "-2"),
    ("truncate_prompt_tokens", "0"),
    ("truncate_prompt_tokens", "1.5"),
    ("truncate_prompt_tokens", "257"),
    ("stream_options", '{"include_obfuscation": true}'),
    ("stream_options", '{"continuous_usage_stats": 1}'),
    ("no_such_field", "1"),
    ("no_such_field", "null"),
    ("model", "5"),
    ("model", "null"),
]
COMPLETION_VALUES: list[tuple[str, str]] = [
    ("prompt", "null"),
    ("prompt", "5"),
    ("prompt", "{}"),
    ("prompt", "[]"),
    ("prompt", "[4096]"),
    ("prompt", "[-1]"),
    ("prompt", "[1, 99999999999999999999]"),
    ("prompt", "[true]"),
    ("prompt", "[1.5]"),
    ("prompt", '["a", 5]'),
    ("prompt", '[[1], "a"]'),
    ("prompt", '[[1, "a"]]'),
    ("prompt", json.dumps(["a"] * 129)),
    ("logprobs", "true"),
    ("logprobs", "-1"),
    ("logprobs", "21"),
    ("echo", '"yes"'),
    ("suffix", '"."'),
    ("messages", "[]"),
    ("max_completion_tokens", "5"),
]
CHAT_VALUES: list[tuple[str, str]] = [
    ("messages", "[]"),
    ("messages", '"hi"'),
    ("messages", "[5]"),
    ("messages", '[{"role": "user"}]'),
    ("messages", '[{"content": "hi"}]'),
    ("messages", '[{"role": "pirate", "content": "hi"}]'),
    ("messages", '[{"role": "tool", "content": null}]'),
    ("messages", '[{"role": "user", "content": "hi", "tool_call_id": "1"}]'),
    ("messages", '[{"role": "user", "content": null}]'),
    ("messages", '[{"role": "user", "content": []}]'),
    ("messages", '[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]'),
    ("messages", '[{"role": "user", "content": [{"type": "text"}]}]'),
    ("messages", '[{"role": "user", "content": "hi", "mood": "good"}]'),
    ("messages", '[{"role": "assistant", "content": "hi", "tool_calls": [{}]}]'),
    ("messages", '[{"role": "user", "content": "hi", "name": 5}]'),
    ("prompt", '"hi"'),
    ("logprobs", "1"),
    ("top_logprobs", "5"),
    ("echo", "true"),
    ("tools", '[{"type": "function"}]'),
    ("tool_choice", '"required"'),
    ("max_completion_tokens", "0"),
    ("best_of", "2"),
]


def body(base: dict[str, Any], field: str, value: str) -> bytes:
    """JSON that Python would not write, as a client might send it."""
    fields = {key: json.dumps(item) for key, item in base.items()}
    fields[field] = value
    return ("{" + ",".join(f'"{key}": {item}' for key, item in fields.items()) + "}").encode()


async def test_every_bad_value_is_a_400_that_names_the_field(stage: Stage) -> None:
    completion: dict[str, Any] = {"model": "demo", "prompt": "Hello"}
    chat: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    cases = [("/v1/completions", completion, *case) for case in VALUES + COMPLETION_VALUES]
    cases += [("/v1/chat/completions", chat, *case) for case in VALUES + CHAT_VALUES]
    for path, base, field, value in cases:
        if path.endswith("chat/completions") and (field, value) == ("min_tokens", "17"):
            continue  # there is room for more in a chat
        response = await stage.http.post(path, content=body(base, field, value))
        error = check_error(response, 400, field)
        assert error["type"] == "invalid_request_error", (field, value)
    assert stage.engine.received == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "demo", "prompt": "\xff"}',
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "a\nb"}',
        b'{"model": "demo", "prompt": "a"} {}',
        b"[" * 100_000,
        b'{"model": "demo", "max_tokens": ' + b"9" * 5_000 + b"}",
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(stage: Stage, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        check_error(await stage.http.post(path, content=content), 400)


@pytest.mark.parametrize(
    ("path", "field", "value", "limit"),
    [
        ("/v1/chat/completions", "messages", [{"role": "user", "content": ""}], MAX_MESSAGES),
        ("/tokenize", "messages", [{"role": "user", "content": ""}], MAX_MESSAGES),
        ("/v1/completions", "prompt", [""], MAX_PROMPTS),
        ("/v1/completions", "prompt", [[1]], MAX_PROMPTS),
    ],
)
async def test_a_list_that_is_too_long_is_refused_with_both_numbers(
    stage: Stage, path: str, field: str, value: list[Any], limit: int
) -> None:
    response = await stage.http.post(path, json={"model": "demo", field: value * (limit + 1)})
    error = check_error(response, 400, field)
    assert error["message"] == f"{field}=a list of {limit + 1}: at most {limit}"


async def test_a_message_of_too_many_parts_is_refused_with_both_numbers(stage: Stage) -> None:
    parts = [{"type": "text", "text": ""}] * (MAX_PARTS + 1)
    error = check_error(await stage.chat(messages=[{"role": "user", "content": parts}]), 400)
    assert error["param"] == "messages[0].content"
    assert error["message"].endswith(f"a list of {MAX_PARTS + 1}: at most {MAX_PARTS}")


async def test_a_missing_field_is_named(stage: Stage) -> None:
    response = await stage.http.post("/v1/completions", json={"model": "demo"})
    check_error(response, 400, "prompt")
    response = await stage.http.post("/v1/chat/completions", json={"messages": []})
    check_error(response, 400)


async def test_the_value_is_shown_but_never_all_of_a_long_one(stage: Stage) -> None:
    error = check_error(await stage.complete(temperature=-3.25), 400, "temperature")
    assert "-3.25" in error["message"]
    error = check_error(await stage.complete(max_tokens="x" * 10_000), 400, "max_tokens")
    assert len(error["message"]) < 300


async def test_an_unknown_model_is_a_404(stage: Stage) -> None:
    for response in (await stage.complete(model="gpt-9"), await stage.chat(model="gpt-9")):
        error = check_error(response, 404)
        assert error["code"] == "model_not_found"
        assert "gpt-9" in error["message"]
    check_error(await stage.http.get("/v1/models/gpt-9"), 404)


async def test_embeddings_are_refused(stage: Stage) -> None:
    call = {"model": "demo", "input": "hi"}
    error = check_error(await stage.http.post("/v1/embeddings", json=call), 404)
    assert error["code"] == "unsupported_endpoint"
    assert "no embeddings" in error["message"]


async def test_unknown_paths_and_methods_are_answered_in_the_same_format(stage: Stage) -> None:
    check_error(await stage.http.get("/v1/nothing"), 404)
    check_error(await stage.http.get("/v1/completions"), 405)
    check_error(await stage.http.delete("/v1/models"), 405)


async def test_a_slash_too_many_is_a_404_and_no_way_to_another_host(stage: Stage) -> None:
    headers = {"Host": "elsewhere.example"}
    response = await stage.http.post("/v1/completions/", json={}, headers=headers)
    error = check_error(response, 404)
    assert error["message"] == "there is no POST /v1/completions/"
    assert "location" not in response.headers


async def test_a_long_path_is_never_repeated_in_full(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "gateway.access"):
        error = check_error(await stage.http.get("/" + "x" * 20_000), 404)
    assert len(error["message"]) < 300
    [record] = [record for record in caplog.records if record.name == "gateway.access"]
    assert len(record.fields["path"]) < 300  # type: ignore[attr-defined]


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(stage: Stage) -> None:
    error = check_error(await stage.complete(prompt=[5] * 300), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "300" in error["message"]
    assert "256" in error["message"]


async def test_a_prompt_longer_than_the_kv_cache_is_refused_with_both_numbers(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(ready=False)
    await stage.engine.publish(kv=kv_pool(4))
    await stage.until(lambda: stage.server.service.why_not_ready() is None)
    error = check_error(await stage.complete(prompt=[5] * 100), 400, "prompt")
    assert "100" in error["message"]
    assert "64" in error["message"]
    error = check_error(await stage.complete(prompt=[5] * 60, max_tokens=6), 400, "max_tokens")
    for number in ("60 tokens", "is 6", "5 blocks", "16 tokens", "has 4"):
        assert number in error["message"]


async def test_max_tokens_beyond_the_context_is_refused_with_the_numbers(stage: Stage) -> None:
    error = check_error(await stage.complete(prompt=[5] * 200, max_tokens=57), 400, "max_tokens")
    for number in ("200", "57", "257", "256"):
        assert number in error["message"]
    error = check_error(await stage.chat(max_completion_tokens=10**9), 400)
    assert error["param"] == "max_completion_tokens"


async def test_refusals_are_counted_by_reason(stage: Stage) -> None:
    await stage.complete(max_tokens=-1)
    await stage.complete(model="gpt-9")
    await stage.complete(prompt=[5] * 300)
    text = (await stage.http.get("/metrics")).text
    for reason in ("invalid", "unknown_model", "too_long"):
        [line] = [
            line
            for line in text.splitlines()
            if "admission_rejections_total{" in line and f'reason="{reason}"' in line
        ]
        assert line.endswith(" 1.0")


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"prompt": ["a"] * 3, "n": 3}, "n", "one call may have 8"),
        ({"prompt": [[1]] * 3, "best_of": 3}, "best_of", "one call may have 8"),
        ({"n": 9}, "n", "one call may have 8"),
        ({"prompt": ["a"] * 129, "n": 3}, "prompt", "at most 128"),
    ],
)
async def test_prompts_times_choices_are_bounded(
    make_stage: MakeStage, changes: dict[str, Any], field: str, expected: str
) -> None:
    stage = await make_stage(max_choices=8)
    error = check_error(await stage.complete(**changes), 400, field)
    assert expected in error["message"]
    stage.answer_text("Hi")
    assert (await stage.complete(prompt=["a", "b"], n=4)).status_code == 200


async def test_a_resumable_stream_has_only_so_many_positions_in_each_event(stage: Stage) -> None:
    many = {"prompt": ["a"] * 2, "n": 65, "stream": True}
    error = check_error(await stage.complete(**many, stream_resume=True), 400, "stream_resume")
    assert "2 prompts with 65 choices each are 130" in error["message"]
    assert "may have 128" in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_parts_that_are_no_text_are_named(stage: Stage, kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": content}]
    error = check_error(await stage.chat(messages=messages), 400)
    assert (error["param"], error["code"]) == ("messages[1].content[1]", "unsupported_parameter")
    assert "text only" in error["message"]
    assert kind in error["message"]


async def test_tools_are_refused_if_the_template_has_none(stage: Stage) -> None:
    stage.answer_text("Hi")
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    response = await stage.chat(messages=messages, tools=[tool], tool_choice="none")
    assert response.status_code == 200, response.text
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        error = check_error(await stage.chat(tools=[tool], **choice), 400, "tools")
        assert "chat template does not describe tools" in error["message"]
