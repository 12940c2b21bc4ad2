"""``python -m gateway`` as a process."""

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from shared.bus.redis_bus import RedisBus
from tests.gateway.conftest import events
from tests.gateway.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
Start = Callable[..., "Process"]


class Process:
    """A gateway that runs by itself."""

    def __init__(self, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--port", "0", *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error", **(environ or {})},
        )
        self.output = ""

    def wait_for(self, pattern: str) -> "re.Match[str]":
        assert self.popen.stderr is not None
        while (found := re.search(pattern, self.output)) is None:
            line = self.popen.stderr.readline()
            assert line, self.output
            self.output += line
        return found

    def url(self) -> str:
        return self.wait_for(r"url=(http://\S+)")[1]

    def wait(self) -> int:
        assert self.popen.stderr is not None
        self.output += self.popen.stderr.read()
        return self.popen.wait(20)


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(*flags: str, environ: dict[str, str] | None = None) -> Process:
        process = Process(*flags, environ=environ)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stderr is not None
        process.popen.stderr.close()


def test_an_idle_gateway_does_without_torch_and_ends_with_status_0(start: Start) -> None:
    process = start("--redis-url", "redis://127.0.0.1:1/0")
    url = process.url()
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "torch" not in maps
    assert "PyTorch" not in process.output
    assert httpx.get(f"{url}/health/live").status_code == 200
    ready = httpx.get(f"{url}/health/ready")
    assert ready.status_code == 503
    assert "Redis" in ready.json()["detail"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.output


async def test_a_second_signal_ends_a_draining_gateway_at_once(
    start: Start, redis_url: str
) -> None:
    bus = RedisBus(redis_url)
    engine = FakeEngine(bus)
    await engine.start_epoch()
    await engine.publish()
    process = start("--redis-url", redis_url)
    async with httpx.AsyncClient(base_url=process.url()) as http:
        deadline = time.monotonic() + 10
        while (await http.get("/health/ready")).status_code != 200:
            assert time.monotonic() < deadline
        body: dict[str, Any] = {"model": "demo", "prompt": "Hi", "stream": True}
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await engine.accept_next()
        process.popen.send_signal(signal.SIGINT)
        process.wait_for("draining open_requests=1")
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        with pytest.raises(httpx.HTTPError):
            await waiting
    await bus.close()


def test_a_port_that_is_taken_is_a_failure(start: Start) -> None:
    first = start("--redis-url", "redis://127.0.0.1:1/0")
    port = first.url().rpartition(":")[2]
    second = start("--redis-url", "redis://127.0.0.1:1/0", "--port", port)
    assert second.wait() == 1


def test_a_bad_setting_is_refused_by_name(start: Start) -> None:
    process = start("--max-body-bytes", "many")
    assert process.wait() == 2
    assert "--max-body-bytes='many'" in process.output


def test_a_file_of_prefixes_that_cannot_be_used_ends_the_process(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": 7}\n')
    process = start("--redis-url", "redis://127.0.0.1:1/0", "--pinned-prefixes", str(file))
    assert process.wait() == 2
    assert f"--pinned-prefixes='{file}': line 2: prompt=7" in process.output


def test_without_a_tokenizer_it_stays_up_and_reports_why(
    start: Start, tmp_path: Path, unused_tcp_port: int
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    process = start("--model", str(tmp_path), "--port", str(unused_tcp_port))
    process.wait_for("answering 503")
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        assert client.get(f"{url}/health/live").status_code == 200
        assert client.get(f"{url}/health/ready").status_code == 503
        assert client.head(f"{url}/health/live").status_code == 200
        assert 'reason="no_engine"} 0.0' in client.get(f"{url}/metrics").text  # for probes
        refused = client.post(f"{url}/v1/completions", json={"model": "bloom", "prompt": "x"})
        assert "admission_rejections" in client.get(f"{url}/metrics").text
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "no tokenizer" in refused.json()["error"]["message"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 1, process.output


@asynccontextmanager
async def playing(redis_url: str) -> AsyncIterator[FakeEngine]:
    """An engine that is ready."""
    bus = RedisBus(redis_url)
    engine = FakeEngine(bus)
    await engine.start_epoch()
    await engine.publish()
    yield engine
    await bus.close()


async def until_ready(http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 10
    while (await http.get("/health/ready")).status_code != 200:
        assert time.monotonic() < deadline


async def test_sigterm_refuses_what_is_new_finishes_what_is_open_and_exits_0(
    start: Start, redis_url: str
) -> None:
    async with playing(redis_url) as engine:
        process = start("--redis-url", redis_url)
        async with httpx.AsyncClient(base_url=process.url(), timeout=20) as http:
            await until_ready(http)
            body = {"model": "demo", "prompt": "Hi", "stream": True}
            waiting = asyncio.ensure_future(http.post("/v1/completions", json=body))
            submit = await engine.accept_next()
            process.popen.send_signal(signal.SIGTERM)
            process.wait_for("draining open_requests=1")
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            ready = await http.get("/health/ready")
            assert (ready.status_code, ready.json()["check"]) == (503, "gateway")
            await engine.generate(submit, [300, 301])
            assert (await waiting).text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait) == 0, process.output


@pytest.mark.parametrize("resumable", [True, False])
async def test_streams_that_outlast_the_drain_get_an_error_that_explains_how_to_resume(
    start: Start, redis_url: str, resumable: bool
) -> None:
    async with playing(redis_url) as engine:
        process = start("--redis-url", redis_url, "--drain-timeout", "0.1")
        async with httpx.AsyncClient(base_url=process.url(), timeout=20) as http:
            await until_ready(http)
            body = {"model": "demo", "prompt": "Hi", "stream": True, "stream_resume": resumable}
            waiting = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await engine.accept_next()
            process.popen.send_signal(signal.SIGTERM)
            [event] = events((await waiting).text)
            error = json.loads(event)["error"]
            assert error["code"] == "shutting_down"
            assert ("resume the stream" in error["message"]) == resumable
            assert error["message"].endswith("send the request again")
        assert await asyncio.to_thread(process.wait) == 0, process.output


async def test_sighup_reads_the_keys_again_and_keeps_them_if_they_are_bad(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    def write(*keys: str) -> None:
        lines = [f"alice sha256:{hashlib.sha256(k.encode()).hexdigest()}\n" for k in keys]
        file.write_text("".join(lines))

    file = tmp_path / "keys"
    write("first-key-of-alice")
    process = start("--redis-url", redis_url, "--api-keys", str(file))
    async with httpx.AsyncClient(base_url=process.url()) as http:

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await http.get("/v1/models", headers=headers)).status_code

        assert await status("first-key-of-alice") == 200
        write("second-key-of-alice")
        process.popen.send_signal(signal.SIGHUP)
        process.wait_for("API keys read keys=1")
        assert await status("first-key-of-alice") == 401
        assert await status("second-key-of-alice") == 200
        file.write_text("second-key-of-alice\n")
        process.popen.send_signal(signal.SIGHUP)
        process.wait_for("API keys not read")
        assert await status("second-key-of-alice") == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert "-key-of-alice" not in process.output


async def test_a_file_of_keys_that_cannot_be_used_ends_the_process(
    start: Start, tmp_path: Path
) -> None:
    process = start("--api-keys", str(tmp_path / "none"))
    assert process.wait() == 2
    assert "--api-keys=" in process.output


async def test_logs_of_the_finest_level_hold_no_secret_and_no_text_of_clients(
    start: Start, redis_url: str
) -> None:
    secrets = {
        "prompt": "Zanzibar hippopotamus",
        "answer": " Quixotic",
        "key": "ps-key-that-nobody-may-read",
        "redis": "password-of-redis",
        "user": "jane.doe@example.org",
        "salt": "salt-of-a-tenant",
        "bad": "value-of-a-bad-field",
    }
    admin = redis.Redis.from_url(redis_url)
    admin.execute_command("ACL", "SETUSER", "u", "on", f">{secrets['redis']}", "~*", "&*", "+@all")
    url = redis_url.replace("redis://", f"redis://u:{secrets['redis']}@")
    async with playing(redis_url) as engine:
        process = start(
            *("--redis-url", url, "--log-level", "debug"),
            environ={"PAGESTREAM_API_KEY": secrets["key"]},
        )
        headers = {"Authorization": f"Bearer {secrets['key']}"}
        async with httpx.AsyncClient(base_url=process.url(), headers=headers) as http:
            await until_ready(http)
            tokens = engine_tokens(await http.post("/tokenize", json={"prompt": secrets["answer"]}))
            body = {
                "model": "demo",
                "prompt": secrets["prompt"],
                "user": secrets["user"],
                "cache_salt": secrets["salt"],
            }
            for stream in (True, False):
                sent = http.post("/v1/completions", json={**body, "stream": stream})
                waiting = asyncio.ensure_future(sent)
                submit = await engine.accept_next()
                await engine.generate(submit, tokens)
                assert (await waiting).status_code == 200
            failing = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await engine.end(await engine.accept_next(), "error", "out of luck")
            assert (await failing).status_code == 500
            for field in ("seed", "nonsense", "model", "temperature"):
                changed = {**body, field: secrets["bad"]}
                assert (await http.post("/v1/completions", json=changed)).status_code >= 400
            other_key = {"Authorization": f"Bearer {secrets['key']}x"}
            assert (await http.get("/v1/models", headers=other_key)).status_code == 401
            assert (await http.get(f"/v1/models?key={secrets['key']}")).status_code == 200
            # Redis ends their connections: what is said of that is said with the URL at hand.
            admin.client_kill_filter(user="u", skipme=True)
            await http.get("/health/ready")
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0, process.output
    admin.execute_command("ACL", "DELUSER", "u")
    admin.close()
    assert "DEBUG" in process.output
    assert "path=/v1/completions" in process.output
    assert not [name for name, secret in secrets.items() if secret.strip() in process.output]


def engine_tokens(response: httpx.Response) -> list[int]:
    found: list[int] = response.json()["tokens"]
    return found
