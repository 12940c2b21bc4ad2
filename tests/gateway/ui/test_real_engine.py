"""The engine's view in a real browser, beside a real scheduler and a real worker."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.page.browser import Browser
from tests.deploy.running import Running, forked_by

NUM_STREAMS = 64
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 256, 64, 16
DEADLINE_S = 10.0
SYSTEM = "These words are the same in all of the conversations, and so they share their blocks. "


@pytest.fixture
def running(session_url: str, tmp_path: Path) -> Iterator[Running]:
    sizes = {"num-blocks": NUM_BLOCKS, "num-host-blocks": NUM_HOST_BLOCKS, "block-size": BLOCK_SIZE}
    started = Running(tmp_path, *(f"--{name}={value}" for name, value in sizes.items()))
    try:
        started.until_ready()
        yield started
    finally:
        started.close()


class Gauges:
    """What ``/metrics`` of the scheduler has, in the numbers of the page."""

    def __init__(self, running: Running, http: httpx.AsyncClient) -> None:
        self._url = f"http://127.0.0.1:{running.metrics['scheduler']}/metrics"
        self._http = http

    async def read(self) -> dict[str, int]:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self._http.get(self._url)).text):
            for sample in family.samples:
                name = sample.name.removeprefix("pagestream:") + sample.labels.get("state", "")
                found[name] = found.get(name, 0.0) + sample.value
        block_bytes = found["kv_cache_capacity_bytes"] / NUM_BLOCKS
        numbers = {
            "used": found["kv_cache_usage_perc"] * NUM_BLOCKS,
            "tokens": found["kv_cache_token_usage_perc"] * NUM_BLOCKS * BLOCK_SIZE,
            "saved": found["kv_blocks_saved_by_sharing"],
            "running": found["num_requests_running"],
            "waiting": found["num_requests_waiting"] - found["num_requests_swapped"],
            "swapped": found["num_requests_swapped"],
            "cached": found["kv_cache_bytescached"] / block_bytes,
            "free": found["kv_cache_bytesfree"] / block_bytes,
        }
        return {name: round(value) for name, value in numbers.items()}


async def viewed(browser: Browser) -> dict[str, int]:
    """The same of the page."""
    shown = await browser.run("return {...document.getElementById('engine').dataset}")
    names = ("used", "tokens", "saved", "running", "waiting", "preempted", "swapped")
    numbers = {name: int(shown[name]) for name in (*names, "cached", "free")}
    numbers["waiting"] += numbers.pop("preempted")
    return numbers


async def check_same(gauges: Gauges, browser: Browser, busy: bool, *also: str) -> dict[str, int]:
    """Wait until the page has what the gauges have, before it was read and after.

    Args:
        busy: requests are running.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        before, page, after = await gauges.read(), await viewed(browser), await gauges.read()
        names = [name for name in page if name not in ("cached", "free") or name in also]
        is_there = (page["running"] > 0) == busy
        if is_there and before == after and all(page[name] == after[name] for name in names):
            return after
        assert time.monotonic() < deadline, f"{busy}: {page} is not {after}"


async def stream(running: Running, number: int) -> None:
    """Read one stream to its end, with a socket: this process must have time for the browser."""
    body = json.dumps(
        {
            "model": "demo",
            "prompt": f"{SYSTEM} Number {number}.",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 120 + number,
            "n": 1 + number % 2,
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(f"{head}{body}".encode())
    answer = await reader.read()
    writer.close()
    assert b"[DONE]" in answer, answer[-500:]


async def check_preemption(browser: Browser, http: httpx.AsyncClient, running: Running) -> None:
    """The time machine explains one as the scheduler decided it."""
    span = (await http.get(f"{running.url}/ui/past")).json()
    since_ms = max(span["first_ms"], span["last_ms"] - 120_000)
    params = {"since_ms": since_ms, "until_ms": span["last_ms"]}
    stretch = (await http.get(f"{running.url}/ui/past/stretch", params=params)).json()
    marks = [mark for frame in stretch["frames"] for mark in frame.get("marks", ())]
    mark: list[Any] = next(mark for mark in marks if mark[0] in ("preempted", "swapped"))
    await browser.until("return document.getElementById('moment').max > 1")
    await browser.run(
        "const m = document.getElementById('moment'); m.value = arguments[0];"
        "m.dispatchEvent(new Event('input'));"
        "document.getElementById('request-list').open = true",
        mark[1] + 1,
    )
    await browser.until(
        "const buttons = [...document.querySelectorAll('#request-rows button')];"
        "const found = buttons.find(one => one.textContent === arguments[0]);"
        "found?.click(); return found",
        f"#{mark[3]}",
    )
    assert "needed a block" in mark[4]
    await browser.shows(mark[4], "request-detail")


async def test_the_map_has_what_metrics_have_under_64_streams_and_at_rest(
    running: Running, browser: Browser
) -> None:
    await browser.open(f"{running.url}/#/engine")
    await browser.until("return document.getElementById('engine').dataset.used")
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        gauges = Gauges(running, http)
        streams = [asyncio.create_task(stream(running, number)) for number in range(NUM_STREAMS)]
        worker = forked_by(running.pid("worker")) or running.pid("worker")
        deadline = time.monotonic() + DEADLINE_S
        while not (await gauges.read())["swapped"]:  # the streams do not wait for a busy browser
            assert time.monotonic() < deadline
        os.kill(worker, signal.SIGSTOP)  # the scheduler makes no more plans than may be in flight
        try:
            found = await check_same(gauges, browser, True)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert found["swapped"] > 0
        assert found["saved"] > 0
        await asyncio.gather(*streams)
        found = await check_same(gauges, browser, False, "cached", "free")
        assert found["used"] == 0
        assert found["cached"] > 0
        await check_preemption(browser, http, running)
    assert await browser.errors() == []
