"""The load generator: its parsing of answers, and its times."""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.event_splitter import EventSplitter
from benchmarks.serving.http_stream import RawAnswer, StreamFailed, Target, ask
from benchmarks.serving.latencies import StreamTimes, medians, read_answer, summarize
from benchmarks.serving.load import Load, Measurement
from tests.benchmarks.serving.fake_server import DONE, FakeServer, event, head, token, usage

ROOT = Path(__file__).parents[3]
EVENTS = [b'{"text": "a"}', b"two\nlines", "später".encode(), b"[DONE]"]
STREAM = (
    b': a comment\r\n\r\ndata: {"text": "a"}\r\n\r\nid: 7\r\ndata: two\r\ndata:lines\r\n\r\n'
    b"event: ping\n\n" + "data: später\r\r".encode() + b"data: [DONE]\n\n"
)
ANSWER = (head(), token("a"), token("b"), token("c", "length"), usage(5, 3), DONE)


def answer(*events: bytes, moments: tuple[float, ...] = ()) -> RawAnswer:
    pieces = EventSplitter().feed(b"".join(events))
    times = moments or tuple(float(number) for number in range(len(pieces)))
    return RawAnswer(0.0, 200, b"", list(zip(times, pieces, strict=True)))


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_where_a_stream_is_cut(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]
    splitter = EventSplitter()
    found = [
        data
        for start, stop in itertools.pairwise(borders)
        for data in splitter.feed(STREAM[start:stop])
    ]
    assert found == EVENTS


async def test_a_chunked_answer_is_read_whatever_its_chunks() -> None:
    body = b"".join(ANSWER[1:])
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + 7]), body[at : at + 7])
        for at in range(0, len(body), 7)
    )
    pieces = [head(more="Transfer-Encoding: chunked\r\n"), chunks[:100], chunks[100:], b"0\r\n\r\n"]
    async with FakeServer(pieces).running() as server:
        times = read_answer(await ask(Target.of(server.url, "/v1/completions", None), {}))
    assert (times.prompt_tokens, times.output_tokens, len(times.arrivals_s)) == (5, 3, 3)


def test_times_are_those_at_which_text_arrives() -> None:
    """Neither an event without text nor one after the text counts."""
    empty = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    events = (empty, token("a"), token("b"), usage(5, 3), DONE)
    times = read_answer(answer(*events, moments=(0.5, 1.0, 3.0, 3.5, 4.0)))
    # Three tokens in two events: the time per token counts tokens.
    assert (times.first_token_s, times.per_token_s) == (1.0, 1.0)


async def test_what_is_sent_later_arrives_later() -> None:
    pieces = (head(), 0.06, token("a"), 0.04, token("b"), usage(5, 3), DONE)
    async with FakeServer(pieces).running() as server:
        times = read_answer(await ask(Target.of(server.url, "/", None), {}))
    assert times.first_token_s >= 0.06
    assert times.arrivals_s[1] - times.arrivals_s[0] > 0


def test_figures_of_a_run_follow_from_the_times_of_its_streams() -> None:
    streams = [
        StreamTimes(10.0, (10.5, 10.6, 10.8), 5, 3),
        StreamTimes(10.0, (11.5, 11.6, 12.0), 5, 3),
    ]
    found = summarize(streams, cpu_s=0.1)
    assert found["output_tokens_per_s"] == pytest.approx(3.0)  # 6 in the 2 s up to the last one
    assert found["total_tokens_per_s"] == pytest.approx(8.0)
    assert found["ttft_ms_mean"] == pytest.approx(1_000)
    assert found["ttft_ms_p50"] == pytest.approx(1_000)
    assert found["tpot_ms_mean"] == pytest.approx((150 + 250) / 2)
    assert found["itl_ms_p99"] == pytest.approx(400, rel=0.05)
    assert found["client_cpu_share"] == pytest.approx(0.05)


def test_medians_are_taken_figure_by_figure() -> None:
    runs = [{"a": 1.0, "b": 9.0}, {"a": 2.0, "b": 7.0}, {"a": 30.0, "b": 8.0}]
    assert medians(runs) == {"a": 2.0, "b": 8.0}


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((token("a"), usage(5, 1)), "without a reason"),
        ((token("a"), DONE), "usage"),
        ((usage(5, 1), DONE), "no text"),
        ((event({"error": {"message": "out of memory"}}),), "out of memory"),
        ((b"data: {half\n\n",), "no JSON"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(events: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(StreamFailed, match=why):
        read_answer(answer(*events))


async def test_a_refusal_is_an_error_with_its_status_and_message() -> None:
    pieces = [head("application/json", "429 Too Many Requests"), b'{"error": "later"}']
    async with FakeServer(pieces).running() as server:
        with pytest.raises(StreamFailed, match=r"429.*later"):
            await ask(Target.of(server.url, "/v1/completions", None), {})


async def test_a_connection_that_breaks_is_a_failure() -> None:
    pieces = [head(more="Content-Length: 1000\r\n"), token("a")]
    async with FakeServer(pieces).running() as server:
        with pytest.raises(StreamFailed, match="before the answer did"):
            await ask(Target.of(server.url, "/", None), {})


async def test_a_run_opens_the_given_number_of_streams_with_different_prompts() -> None:
    load = Load("completions", "m", prompt_tokens=5, output_tokens=3)
    ends: list[None] = []
    async with FakeServer([ANSWER[0], 0.1, *ANSWER[1:]]).running() as server:
        target = Target.of(server.url, "/v1/completions", None)
        measurement = Measurement(target, load, random.Random(0), requests_per_client=2)
        found = await measurement.run(4, lambda: ends.append(None))
    assert found["requests"] == len(ends) == len(server.requests) == 8
    assert server.most_at_once == 4
    prompts = {json.dumps(request["prompt"]) for request in server.requests}
    assert len(prompts) == 8
    for request in server.requests:
        assert request["ignore_eos"] is True
        assert request["max_tokens"] == 3
        assert request["temperature"] == 0
        assert "top_p" not in request


def test_a_load_may_be_drawn() -> None:
    load = Load("chat", "m", 5, 3, temperature=0.7, top_p=0.9)
    body = load.body(random.Random(0), num_words=5)
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)


async def test_a_server_that_ends_early_is_not_measured() -> None:
    load = Load("completions", "m", prompt_tokens=5, output_tokens=4)
    async with FakeServer(ANSWER).running() as server:
        measurement = Measurement(Target.of(server.url, "/", None), load, random.Random(0))
        with pytest.raises(StreamFailed, match="3 tokens instead of 4"):
            await measurement.run(1, lambda: None)


@pytest.fixture
def fake_url() -> Iterator[str]:
    """A fake server on a thread, because the load comes from another process."""
    started, stop = threading.Event(), asyncio.Event()
    server = FakeServer(ANSWER)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server.running():
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    yield server.url
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def test_the_command_writes_medians_and_runs(fake_url: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    flags = ["--base-url", fake_url, "--model", "m", "--concurrency", "1,3", "--output-tokens", "3"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.load",
        *flags,
        "--runs",
        "2",
        "--json",
        found,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())["concurrency"]
    assert set(result) == {"1", "3"}
    assert [run["requests"] for run in result["3"]["runs"]] == [3, 3]
    assert result["3"]["median"]["output_tokens"] == 9


def test_the_command_fails_with_the_reason(fake_url: str) -> None:
    flags = ["--base-url", fake_url, "--model", "m", "--output-tokens", "4"]
    command = [sys.executable, "-m", "benchmarks.serving.load", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "3 tokens instead of 4" in done.stderr
