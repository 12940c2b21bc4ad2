"""The launcher with its real services: its output, and restarts after deaths."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.settings import REPOSITORY
from tests.deploy.running import (
    SERVICES,
    STOP_DEADLINE_S,
    Running,
    alive,
    forked_by,
    outside,
    process_state,
    ready_lines,
)

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="the tests read /proc")

RECOVERY_DEADLINE_S = 60.0
SPAWNED = tuple(name for name in SERVICES if name != "redis")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    started = Running(tmp_path_factory.mktemp("serve"))
    yield started
    started.close()


@pytest.fixture
def running(shared: Running) -> Running:
    """A launcher that is ready; tests share it as long as they leave it running."""
    if shared.process.poll() is not None:
        shared.start()
    shared.until_ready()
    return shared


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*flags: str, environ: dict[str, str] | None = None) -> Running:
        started.append(Running(tmp_path, *flags, environ=environ))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_it_prints_one_ready_line_whose_command_works(running: Running) -> None:
    [line] = ready_lines(running.output())
    assert running.url in line
    assert "serves demo" in line
    assert re.search(r"worker +is running: (?!\d{4}-)", running.output()), "nothing on its progress"
    command = shlex.split(line.partition("try: ")[2])
    assert command[0] == "curl"
    done = subprocess.run(
        [*command, "--silent", "--fail"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, running.story()
    assert '"text"' in done.stdout


def test_a_request_can_be_explained_without_a_redis_url(running: Running) -> None:
    _, answer = running.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2})
    request_id = answer["id"].removeprefix("cmpl-")

    def explain(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [REPOSITORY / "scripts" / "explain", name],
            cwd="/",
            env=outside() | {"PAGESTREAM_STATE_DIR": str(running.state)},
            capture_output=True,
            text=True,
            check=False,
        )

    for name in (answer["id"], f"chatcmpl-{request_id}", request_id[:12]):
        found = explain(name)
        assert found.returncode == 0, found.stderr
        assert f"request {request_id}" in found.stdout
    unknown = explain("no-such-request")
    assert unknown.returncode == 1
    [place] = re.findall(r"redis +is .*, at (\S+)$", running.output(), re.MULTILINE)
    assert f"unix://{place}, from {running.state / 'run' / 'redis.url'}" in unknown.stderr


def test_redis_and_all_files_are_out_of_other_users_reach(running: Running) -> None:
    url = (running.state / "run" / "redis.url").read_text()
    assert url.startswith("unix://")
    listening = Path(f"/proc/{running.pid('redis')}/net/tcp").read_text().splitlines()[1:]
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{running.pid('redis')}/fd").iterdir()}
    assert not [line for line in listening if f"socket:[{line.split()[9]}]" in sockets]
    for folder in ("run", "log", "redis"):
        assert (running.state / folder).stat().st_mode & 0o077 == 0
    assert running.state.stat().st_mode & 0o077 == 0
    files = [*(running.state / "log").iterdir(), *(running.state / "redis").rglob("*")]
    assert not [file for file in files if file.is_file() and file.stat().st_mode & 0o077]


def test_a_second_launcher_on_the_same_folder_names_the_first(running: Running) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "deploy.serve", "--state-dir", running.state, "--port", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"in use by process {running.process.pid}:" in second.stderr
    assert "started" not in second.stdout


def test_services_do_not_get_the_terminals_signals(running: Running) -> None:
    for pid in running.pids().values():
        assert os.getsid(pid) == pid


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_no_service_takes_a_core_from_threads_that_compute(running: Running) -> None:
    for service, pid in running.pids().items():
        assert os.sched_getscheduler(forked_by(pid) or pid) == os.SCHED_BATCH, service


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_comes_back_and_the_same_request_gets_the_same_answer(
    running: Running, service: str
) -> None:
    before = running.complete()
    pids = running.pids()
    os.kill(pids[service], signal.SIGKILL)

    def is_back() -> bool:
        try:
            return running.pid(service) != pids[service]
        except (FileNotFoundError, ValueError):
            return False

    running.until(is_back, RECOVERY_DEADLINE_S, f"the restart of {service}")
    assert running.complete() == before
    others = {name: pid for name, pid in running.pids().items() if name != service}
    assert others == {name: pid for name, pid in pids.items() if name != service}
    assert re.search(rf"{service} +died \(signal SIGKILL\)", running.output())


@pytest.mark.parametrize("service", SPAWNED)
def test_a_service_killed_without_its_spawner_is_back_and_the_terminal_shows_it(
    running: Running, service: str
) -> None:
    before = running.complete()
    spawner = running.pid(service)
    pid = forked_by(spawner)
    num_back = running.output().count(f"{service:<9} is back after")
    os.kill(pid or 0, signal.SIGKILL)
    running.until(
        lambda: running.output().count(f"{service:<9} is back after") > num_back,
        RECOVERY_DEADLINE_S,
        f"news of {service}",
    )
    assert f"{service:<9} died (signal SIGKILL); it is started again" in running.output()
    assert running.complete() == before
    assert running.pid(service) == spawner
    assert forked_by(spawner) not in (None, pid)


def test_a_killed_launcher_takes_its_services_along_and_the_next_start_works(
    running: Running,
) -> None:
    text = running.complete()
    pids = running.pids()
    running.process.kill()
    running.process.wait(STOP_DEADLINE_S)
    running.start()  # at once, while services may still be ending
    running.until_ready()
    # Ready means the new worker, not the lease of the killed one that Redis still holds.
    assert "worker ready" in (running.state / "log" / "worker.log").read_text()
    assert not [name for name, pid in pids.items() if alive(pid)]
    assert running.complete() == text


def test_sigterm_ends_everything_in_order_with_exit_code_zero(running: Running) -> None:
    pids = running.pids()
    assert running.stop() == 0, running.story()
    stopped = re.findall(r"(\w+) +stopped \(exit code 0\)", running.output())
    assert stopped == ["gateway", "scheduler", "worker", "redis"]
    asked = re.findall(r"(\w+) +is to end, in \d+ s at most", running.output())
    assert asked == stopped
    assert not [name for name, pid in pids.items() if alive(pid)]
    assert not list((running.state / "run").glob("[!s]*.pid"))
    assert len(ready_lines(running.output())) == 1


def test_a_model_that_cannot_be_served_ends_the_start_with_the_workers_reason(
    launch: Callable[..., Running], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (broken / name).write_bytes((REPOSITORY / "models" / "demo" / name).read_bytes())
    (broken / "config.json").write_text('{"model_type": "t5", "vocab_size": 4096}')
    running = launch("--model", str(broken))
    assert running.process.wait(STOP_DEADLINE_S) == 78, running.story()
    *_, before, reason = running.output().splitlines()
    assert before.endswith("error: worker cannot run (exit code 78):")
    assert "t5" in reason
    assert not ready_lines(running.output())


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--block-size", "many"], {}, "--block-size='many'"),
        ([], {"PAGESTREAM_PORTT": "1"}, "PAGESTREAM_PORTT='1'"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_starts(
    launch: Callable[..., Running], flags: list[str], environ: dict[str, str], message: str
) -> None:
    running = launch(*flags, environ=environ)
    assert running.process.wait(STOP_DEADLINE_S) == 2
    assert message in running.output()
    assert not running.state.exists()


def test_a_port_in_use_is_reported_at_once(launch: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        running = launch("--port", str(port))
        assert running.process.wait(STOP_DEADLINE_S) == 1
    assert f"--port={port}" in running.output()
    assert "started" not in running.output()


def test_the_second_request_to_stop_ends_everything_at_once(
    launch: Callable[..., Running],
) -> None:
    running = launch()
    running.until(lambda: "gateway   started" in running.output(), 20.0, "the start")
    pids = running.pids()
    os.kill(pids["gateway"], signal.SIGSTOP)  # a gateway that would never drain
    running.until(lambda: process_state(pids["gateway"]) == "T", 10.0, "the gateway's stop")
    running.process.send_signal(signal.SIGINT)
    running.until(lambda: "stopping" in running.output(), 10.0, "the first request")
    running.until(lambda: _stops_on_another(running), 20.0, "the end")
    assert running.process.returncode == 1, running.story()
    assert not [name for name, pid in pids.items() if alive(pid)]


def _stops_on_another(running: Running) -> bool:
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        return False
    return True


def test_with_api_keys_the_launcher_detects_readiness_and_clients_need_a_key(
    launch: Callable[..., Running],
) -> None:
    key = "a-key-of-the-environment"
    running = launch(environ={"PAGESTREAM_API_KEY": key})
    running.until_ready()
    [line] = ready_lines(running.output())
    assert "Bearer YOUR-KEY" in line
    assert running.post("/v1/completions", {"model": "demo", "prompt": "a"})[0] == 401
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "demo", "prompt": "Once", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{running.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
    for service in ("scheduler", "worker"):
        assert key not in Path(f"/proc/{running.pid(service)}/environ").read_text()
    logs = "".join(path.read_text() for path in (running.state / "log").glob("*.log"))
    assert key not in running.output() + logs


def test_an_open_stream_is_finished_before_everything_ends(running: Running) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 150, "ignore_eos": True}
    request = urllib.request.Request(
        f"{running.url}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.readline().startswith(b"data: ")
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda: "gateway   is to end" in running.output(), 20.0, "the drain")
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert running.process.wait(STOP_DEADLINE_S) == 0, running.story()


@pytest.mark.parametrize(
    ("flag", "url", "reason"),
    [
        ("--redis-url", "redsi://127.0.0.1/0", "REDIS_URL='redsi://...': expected redis[s]://"),
        ("--directory-url", "redis://127.0.0.1:1/0", "DIRECTORY_URL: Redis does not answer"),
    ],
)
def test_a_redis_that_cannot_be_used_ends_the_start_with_the_reason(
    launch: Callable[..., Running], flag: str, url: str, reason: str
) -> None:
    running = launch(flag, url)
    assert running.process.wait(STOP_DEADLINE_S) in (1, 2)
    assert reason in running.output().splitlines()[-1]
    assert "started" not in running.output()


def test_a_wrong_password_of_redis_ends_the_start_with_the_reason(
    launch: Callable[..., Running], redis_url: str
) -> None:
    running = launch("--redis-url", redis_url.replace("redis://", "redis://someone:secret@"))
    assert running.process.wait(STOP_DEADLINE_S) == 1
    assert "REDIS_URL: Redis refused user or password" in running.output()
    assert "secret" not in running.output()


def test_a_model_that_is_away_for_a_while_costs_no_stream_and_for_good_ends_it(
    launch: Callable[..., Running], tmp_path: Path
) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(REPOSITORY / "models" / "demo", model)
    few_bytes = ("--max-log-bytes", "1KiB")
    running = launch("--model", str(model), "--worker-patience", "20", *few_bytes)
    running.until_ready()

    def lose_the_model(run: Callable[[], None]) -> bytes:
        """Kill the worker after moving its model away; the end of its stream."""
        body = {"model": "model", "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
        request = urllib.request.Request(
            f"{running.url}/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert response.readline().startswith(b"data: ")
            model.rename(away)
            os.kill(forked_by(running.pid("worker")) or 0, signal.SIGKILL)
            run()
            answer: bytes = response.read()
            return answer

    def until_it_comes_back() -> None:
        futile = "worker    died (exit code 78)"
        running.until(lambda: futile in running.output(), RECOVERY_DEADLINE_S, "an attempt")
        away.rename(model)

    assert lose_the_model(until_it_comes_back).endswith(b"data: [DONE]\n\n")
    end = lose_the_model(lambda: None)
    assert b"[DONE]" not in end
    assert b"error" in end
    assert running.process.wait(STOP_DEADLINE_S) == 78
    assert "no such folder" in running.output().splitlines()[-1]
    assert (running.state / "log" / "worker.log.1").stat().st_size > 1024
    logs = [*(running.state / "log").glob("worker.log*")]
    assert "".join(map(Path.read_text, logs)).count(" worker ready ") == 2
