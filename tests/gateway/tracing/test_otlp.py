"""Spans over OTLP, as a collector receives them."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from gateway.tracing.otlp_tracer import OtlpTracer
from gateway.tracing.phases import Phase, PhaseSpan
from gateway.tracing.trace_context import TraceContext
from gateway.tracing.tracer import tracer_of
from shared.errors import SettingsError
from shared.messages.endings import EndFlag
from shared.settings import load
from tests.gateway.conftest import MakeStage
from tests.gateway.resume.played_streams import Played
from tests.gateway.tracing.collector import Collector, ReceivedSpan, collecting

ROOT = Path(__file__).parents[3]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, DROPPED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
PHASE = PhaseSpan(
    *(TraceContext(TRACE, SPAN, True), "engine-0", "demo", "a", Phase.DECODE),
    *(1_000, 2_000, {"tokens": 3}),
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    [span] = [span for span in spans if span.name == name]
    return span


async def test_a_call_and_its_phases_are_one_trace(
    collector: Collector, make_stage: MakeStage
) -> None:
    stage = await make_stage(otlp_endpoint=collector.url)

    async def serve() -> None:
        submit = await stage.engine.accept_next()
        row = submit.request_id
        await stage.engine.step({row: 5}, admitted={row: 0})
        await stage.engine.step({row: 6}, {row: EndFlag.LENGTH})

    stage.spawn(serve())
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 2}
    headers = {"traceparent": SAMPLED, "X-Request-Id": "mine-1"}
    response = await stage.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    await stage.http.get("/health")
    assert stage.server.service.tracer is not None
    await stage.server.service.tracer.close()

    spans = collector.spans
    call = named(spans, "POST /v1/completions")
    assert (call.trace_id, call.parent_id, call.is_error) == (TRACE, SPAN, False)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "demo",
        "gen_ai.usage.output_tokens": 2,
        "pagestream.finish_reason": "length",
        "pagestream.client_id": "mine-1",
    }
    assert expected.items() <= call.attributes.items()
    phases = [named(spans, name) for name in ("queue", "prefill", "decode")]
    assert len(spans) == 1 + len(phases)
    for span in phases:
        assert (span.trace_id, span.parent_id) == (TRACE, call.span_id)
        assert span.attributes["pagestream.engine"] == "engine-0"
        assert call.attributes["pagestream.call_id"] in span.attributes["pagestream.request_id"]
        assert call.start_ns <= span.start_ns <= span.end_ns <= call.end_ns
    assert phases[0].end_ns == phases[1].start_ns
    assert phases[1].end_ns == phases[2].start_ns
    assert phases[2].attributes["pagestream.tokens"] == 2
    assert collector.resource["service.name"] == "pagestream-gateway"
    assert set(collector.paths) == {"/v1/traces"}


async def test_a_call_without_a_context_begins_a_trace(
    collector: Collector, make_stage: MakeStage
) -> None:
    stage = await make_stage(otlp_endpoint=collector.url)
    refused = await stage.complete(max_tokens=-1)
    assert refused.status_code == 400
    dropped = {"traceparent": DROPPED}
    assert (await stage.http.get("/v1/models", headers=dropped)).status_code == 200
    assert stage.server.service.tracer is not None
    await stage.server.service.tracer.close()
    [call] = collector.spans
    assert (call.name, call.parent_id) == ("POST /v1/completions", "")
    assert call.attributes["http.response.status_code"] == 400
    assert call.attributes["pagestream.param"] == "max_tokens"
    assert not call.is_error  # the client's mistake


async def test_a_stream_that_goes_on_is_linked_and_its_secret_is_not_sent(
    collector: Collector, make_stage: MakeStage
) -> None:
    stage = await make_stage(otlp_endpoint=collector.url)
    body = {"model": "demo", "prompt": "Hello", "stream": True, "stream_resume": True}
    stage.spawn(Played(stage.engine, [5, 6]).serve())
    first = await stage.http.post("/v1/completions", json=body)
    url = first.headers["x-stream-url"]
    assert (await stage.http.get(url)).status_code == 200
    assert stage.server.service.tracer is not None
    await stage.server.service.tracer.close()
    call = named(collector.spans, "POST /v1/completions")
    again = named(collector.spans, "GET /v1/streams/{stream_id}")
    assert again.links == (call.span_id,)
    recovered = named(collector.spans, "recovered")
    assert (recovered.trace_id, recovered.parent_id) == (call.trace_id, call.span_id)
    assert url.rpartition("/")[2] not in str(collector.spans)


async def test_a_response_in_the_background_belongs_to_the_trace_of_its_call(
    collector: Collector, make_stage: MakeStage
) -> None:
    stage = await make_stage(otlp_endpoint=collector.url)
    body = {"model": "demo", "input": "Hello", "background": True}
    headers = {"traceparent": SAMPLED}
    made = await stage.http.post("/v1/responses", json=body, headers=headers)
    assert made.status_code == 200, made.text
    attach = await stage.engine.read_attach()
    submit = await stage.engine.accept_attach(attach, [])
    await stage.engine.generate(submit, [5])
    await stage.until(lambda: stage.model.engine.num_open == 0)
    assert stage.server.service.tracer is not None
    await stage.server.service.tracer.close()
    call = named(collector.spans, "POST /v1/responses")
    decode = named(collector.spans, "decode")
    assert (call.trace_id, call.parent_id) == (TRACE, SPAN)
    assert (decode.trace_id, decode.parent_id) == (TRACE, call.span_id)


async def test_the_engine_receives_the_context_with_and_without_a_collector(
    collector: Collector, make_stage: MakeStage
) -> None:
    for endpoint in (None, collector.url):
        stage = await make_stage(otlp_endpoint=endpoint)
        for given in (SAMPLED, "garbage"):
            asked = asyncio.ensure_future(
                stage.http.post(
                    "/v1/completions",
                    json={"model": "demo", "prompt": "Hello"},
                    headers={"traceparent": given},
                )
            )
            submit = await stage.engine.accept_next()
            await stage.engine.generate(submit, [5])
            assert (await asked).status_code == 200
            if endpoint is None:
                assert submit.traceparent == (SAMPLED if given == SAMPLED else "")
            else:
                found = TraceContext.parse(submit.traceparent)
                assert found is not None
                assert found.span_id != SPAN
                assert (found.trace_id == TRACE) == (given == SAMPLED)


async def test_a_collector_that_hangs_delays_no_call(
    collector: Collector, make_stage: MakeStage
) -> None:
    collector.answers.clear()
    stage = await make_stage(otlp_endpoint=collector.url)
    stage.answer_text("Hi")
    assert (await stage.complete()).status_code == 200
    await asyncio.to_thread(collector.arrived.wait, 10)
    assert (await stage.complete()).status_code == 200
    assert not collector.answers.is_set()
    collector.answers.set()


async def test_a_collector_that_fails_is_logged_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    collector.status = 400
    tracer = OtlpTracer(collector.url + "/custom/path", "gateway")
    for _ in range(3):
        tracer.record(PHASE)
        await asyncio.to_thread(tracer.flush)
    collector.status = 200
    tracer.record(PHASE)
    await tracer.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("spans not sent; they are lost until it works again") == 1
    [again] = [record for record in caplog.records if record.getMessage() == "spans sent again"]
    assert vars(again)["fields"]["lost"] == 3
    assert [name for name in collector.paths if name != "/custom/path"] == []
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_no_package_of_it_is_imported_without_an_endpoint() -> None:
    code = """
import sys
import gateway.__main__
from gateway.tracing.tracer import tracer_of

assert tracer_of(None, "gateway") is None
# redis-py imports opentelemetry.sdk.metrics by itself where it is installed.
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto", "google.")
print([name for name in sys.modules if name.startswith(ours)])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gateway.tracing.otlp_tracer", None)
    with pytest.raises(SettingsError, match="pip install opentelemetry-sdk"):
        tracer_of("http://127.0.0.1:4318", "gateway")


@pytest.mark.parametrize(
    "text", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "http:// x"]
)
def test_what_is_no_collector_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="otlp-endpoint"):
        load(GatewaySettings, {"otlp_endpoint": text}, {})
