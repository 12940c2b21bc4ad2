"""Kills a gateway, an engine and the engine's Redis at once; all of them are real processes.

The engine's scheduler and worker share a process. The client comes back by the stream's URL.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.processes.fleet import DEADLINE_S, Processes, text_of, wait_for

BODY = {
    "model": "demo",
    "prompt": "Once",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
}
NUM_SEEN = 20  # events


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path, stack)


def seen_of(url: str) -> tuple[str, str, str, str]:
    """The beginning of a stream: its text, its URL, its engine and the id of the last event."""
    text, event_id = "", ""
    body = BODY | {"stream": True, "stream_resume": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        num_events = 0
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            text += text_of(line)
            num_events += line.startswith("data: {")
            if num_events == NUM_SEEN:
                break
        engine = answer.headers["x-engine"].partition(";")[0]
        return text, answer.headers["x-stream-url"], engine, event_id


def test_a_stream_goes_on_though_its_gateway_and_engine_and_redis_are_killed_together(
    processes: Processes, redis_url: str
) -> None:
    engines = ("engine-0", "engine-1")
    for name in engines:
        processes.start_engine(name, processes.start_redis(f"{name}-redis"), redis_url)
    urls = [processes.start_gateway(f"gateway-{number}", redis_url) for number in range(2)]
    for url in urls:
        wait_for(url, processes)
    text, stream_url, engine, event_id = seen_of(urls[0])
    processes.kill("gateway-0", engine, f"{engine}-redis")
    headers = {"Last-Event-ID": event_id}
    path = httpx.URL(stream_url).path
    rest = httpx.get(f"{urls[1]}{path}", headers=headers, timeout=DEADLINE_S)
    assert rest.status_code == 200, f"{rest.text}\n{processes.logs()}"
    assert "data: [DONE]" in rest.text, f"{rest.text}\n{processes.logs()}"
    text += "".join(map(text_of, rest.iter_lines()))
    whole = httpx.post(f"{urls[1]}/v1/completions", json=BODY, timeout=DEADLINE_S)
    assert whole.headers["x-engine"].partition(";")[0] == ({*engines} - {engine}).pop()
    assert text == whole.json()["choices"][0]["text"]
