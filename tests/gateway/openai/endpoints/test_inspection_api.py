"""Models, tokens, health and metrics."""

import json
import re

import pytest

from shared.version import version
from tests.gateway.conftest import DEMO_MODEL, MakeStage, Stage


async def test_the_one_model_is_listed_and_found(stage: Stage) -> None:
    client = stage.openai
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "pagestream"


async def test_a_model_has_what_clients_of_vllm_look_for(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False, served_model_name="other")
    [card] = (await stage.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("other", DEMO_MODEL, None)
    assert (card["parent"], card["permission"]) == (None, [])


async def test_a_model_may_be_served_under_another_name(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False, served_model_name="org/other")
    response = await stage.http.get("/v1/models/org/other")
    assert response.json()["id"] == "org/other"


async def test_text_becomes_tokens_and_text_again(stage: Stage) -> None:
    text = "Good day, “sir” 😀"
    tokens = stage.tokenizer.encode(text)
    found = (await stage.http.post("/tokenize", json={"model": "demo", "prompt": text})).json()
    assert found == {"count": len(tokens), "max_model_len": 256, "tokens": tokens}
    bare = await stage.http.post(
        "/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    )
    assert bare.json()["tokens"] == tokens[1:]
    assert len(bare.json()["token_strs"]) == len(tokens) - 1
    back = await stage.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "<|bos|>" + text}


async def test_a_conversation_becomes_tokens(stage: Stage) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for prompt, text in ((True, "<|bos|><|user|>Hi<|assistant|>"), (False, "<|bos|><|user|>Hi")):
        body = {"messages": messages, "add_generation_prompt": prompt}
        tokens = (await stage.http.post("/tokenize", json=body)).json()["tokens"]
        back = await stage.http.post("/detokenize", json={"tokens": tokens})
        assert back.json() == {"prompt": text}


async def test_tokens_out_of_the_vocabulary_have_no_text(stage: Stage) -> None:
    response = await stage.http.post("/detokenize", json={"tokens": [1, 4096]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens[1]"


async def test_the_version_is_reported(stage: Stage) -> None:
    assert (await stage.http.get("/version")).json() == {"version": version()}


async def test_a_ready_gateway_reports_that_it_is_ready(stage: Stage) -> None:
    assert (await stage.http.get("/health/live")).status_code == 200
    ready = await stage.http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


async def test_health_is_a_status_alone_and_needs_no_key(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False, api_key="x" * 20)
    away = await stage.http.get("/health")
    assert (away.status_code, away.content) == (503, b"")
    assert int(away.headers["retry-after"]) >= 1
    await stage.engine.publish()
    await stage.until(lambda: stage.server.service.why_not_ready() is None)
    ready = await stage.http.get("/health")
    assert (ready.status_code, ready.content) == (200, b"")


async def test_metrics_may_have_a_key_of_their_own(make_stage: MakeStage) -> None:
    client, scraper = "c" * 20, "s" * 20
    stage = await make_stage(api_key=client, metrics_key=scraper)

    async def status(path: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return (await stage.http.get(path, headers=headers)).status_code

    assert await status("/metrics", scraper) == 200
    assert await status("/metrics", client) == 401
    assert (await stage.http.get("/metrics")).status_code == 401
    assert await status("/v1/models", client) == 200
    assert await status("/v1/models", scraper) == 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
async def test_a_probe_may_use_head(make_stage: MakeStage, path: str) -> None:
    stage = await make_stage(ready=False)
    head, whole = await stage.http.head(path), await stage.http.get(path)
    assert head.status_code == whole.status_code
    assert head.headers.get("content-type") == whole.headers.get("content-type")
    assert head.content == b""


async def test_the_api_describes_itself(stage: Stage) -> None:
    docs = await stage.http.get("/docs")
    assert docs.status_code == 200
    assert 'fetch("/openapi.json"' in docs.text
    assert not re.findall(r"(?:src|href)=|https?://|@import", docs.text), "nothing from elsewhere"
    assert "default-src 'none'" in docs.headers["content-security-policy"]
    described = (await stage.http.get("/openapi.json")).json()
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert refs <= described["components"]["schemas"].keys()
    assert {"CompletionBody", "ChatBody"} <= refs
    chat = described["components"]["schemas"]["ChatBody"]
    assert set(chat["required"]) == {"model", "messages"}
    for body in (chat, described["components"]["schemas"]["CompletionBody"]):
        assert {"use_beam_search", "length_penalty", "early_stopping"} <= body["properties"].keys()


async def test_every_call_has_an_id_that_the_log_repeats(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.answer_text("secret answer")
    with caplog.at_level("INFO", "gateway.access"):
        response = await stage.complete(prompt="secret question", max_tokens=40)
    [record] = [record for record in caplog.records if record.name == "gateway.access"]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["id"] == response.headers["x-request-id"]
    assert response.json()["id"] == f"cmpl-{fields['id']}"
    assert fields["status"] == 200
    assert fields["completion_tokens"] == response.json()["usage"]["completion_tokens"]
    assert fields["finish_reason"] == "length"
    assert "secret" not in str(fields)


async def test_the_clients_name_of_a_call_is_in_its_answer_and_the_log_but_is_no_request_id(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.answer_text("Good day")
    name = "job-7/" + "a" * 122
    call = {"model": "demo", "prompt": "hi", "max_tokens": 4}
    with caplog.at_level("INFO", "gateway.access"):
        response = await stage.http.post(
            "/v1/completions", json=call, headers={"X-Request-Id": name}
        )
    assert response.headers.get_list("x-request-id") == [name]
    [record] = [record for record in caplog.records if record.name == "gateway.access"]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["client_id"] == name
    assert re.fullmatch("[0-9a-f]{32}", fields["id"])
    assert response.json()["id"] == f"cmpl-{fields['id']}"
    refused = await stage.http.get("/v1/nothing", headers={"X-Request-Id": name})
    assert (refused.status_code, refused.headers["x-request-id"]) == (404, name)


@pytest.mark.parametrize(
    "names", [[""], ["a b"], ["a" * 129], ["a\tb"], ['a"b'], ["\xe9"], ["one", "two"]], ids=ascii
)
async def test_a_name_of_another_form_is_not_repeated(stage: Stage, names: list[str]) -> None:
    headers = [(b"X-Request-Id", name.encode("latin-1")) for name in names]
    response = await stage.http.get("/version", headers=headers)
    [answered] = response.headers.get_list("x-request-id")
    assert re.fullmatch("[0-9a-f]{32}", answered)


async def test_latencies_and_lengths_are_measured(stage: Stage) -> None:
    stage.answer_text("Good day to you")
    body = (await stage.complete(max_tokens=40)).json()
    text = (await stage.http.get("/metrics")).text

    def value(name: str) -> float:
        [line] = [
            line
            for line in text.splitlines()
            if line.startswith(f"pagestream:{name}{{") and ("reason" not in line or "leng" in line)
        ]
        return float(line.rpartition(" ")[2])

    tokens = body["usage"]["completion_tokens"]
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == tokens - 1
    assert value("e2e_request_latency_seconds_count") == 1
    assert value("request_generation_tokens_sum") == tokens
    assert value("request_prompt_tokens_sum") == body["usage"]["prompt_tokens"]
    assert value("request_success_total") == 1
    assert value("open_streams") == 0
