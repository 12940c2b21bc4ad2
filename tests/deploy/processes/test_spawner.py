"""The spawner with a small service, and with the real ones up to the fork."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.settings import REPOSITORY
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from tests.deploy.running import alive, forked_by

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

DEADLINE_S = 60.0
SERVICE = '''
"""Does what its first argument says, in every process that is forked for it."""
import atexit, os, signal, sys, threading, time
from shared.logs import setup_logging

def say(text):
    os.write(2, f"{text}\\n".encode())

def prepare():
    setup_logging("service", "info")
    if sys.argv[1] == "threaded":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def main(ready):
    how = sys.argv[1]
    atexit.register(say, "taken apart")
    if how.startswith("exit"):
        return int(how[4:])
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: heard.append(number))
    ready()
    ready()
    say(f"serving {os.getpid()}")
    while signal.SIGTERM not in heard and signal.SIGINT not in heard:
        time.sleep(0.01)  # instead of work: what comes meanwhile is heard
        if signal.SIGHUP in heard:
            say("reloaded")
            heard.clear()
    say(f"heard {len(heard)}")
    return 0
'''


class Spawned:
    """``python -m deploy.processes.spawner`` and its output."""

    def __init__(self, folder: Path, *words: str, environ: dict[str, str] | None = None) -> None:
        self._log = folder / "log"
        path = os.pathsep.join([str(folder), str(REPOSITORY)])
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.processes.spawner", *words],
                env={**os.environ, "PYTHONPATH": path, **(environ or {})},
                stderr=log,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._log.read_text()

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)  # polling interval of the condition

    def serving(self, num: int = 1) -> int:
        """Process id of the service's ``num``-th process, once it serves."""
        self.until(lambda: len(self._pids()) >= num)
        return self._pids()[num - 1]

    def _pids(self) -> list[int]:
        return [int(found) for found in re.findall(r"^serving (\d+)$", self.output(), re.MULTILINE)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Spawned]]:
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__main__.py").write_text(SERVICE)
    started: list[Spawned] = []

    def start(*words: str, environ: dict[str, str] | None = None) -> Spawned:
        started.append(Spawned(tmp_path, *words, environ=environ))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_killed_service_is_forked_again_and_the_log_has_the_time_until_then(
    spawn: Callable[..., Spawned],
) -> None:
    spawned = spawn("service", "serve")
    first = spawned.serving()
    os.kill(first, signal.SIGKILL)
    second = spawned.serving(2)
    os.kill(second, signal.SIGKILL)
    spawned.serving(3)
    assert spawned.process.poll() is None
    assert spawned.output().count("died pid=") == 2
    back = r'INFO +service back after_s=\d+\.\d+ predecessor="signal SIGKILL"'
    assert len(re.findall(back, spawned.output())) == 2


def test_a_service_that_a_signal_ends_without_its_spawner_is_forked_again(
    spawn: Callable[..., Spawned],
) -> None:
    spawned = spawn("service", "serve")
    os.kill(spawned.serving(), signal.SIGTERM)
    spawned.serving(2)
    assert "taken apart" not in spawned.output(), "its successor waits for that"
    assert spawned.process.poll() is None
    assert "heard 1" in spawned.output()
    spawned.process.send_signal(signal.SIGTERM)
    assert spawned.process.wait(DEADLINE_S) == 0


def test_the_service_dies_with_a_killed_spawner(spawn: Callable[..., Spawned]) -> None:
    spawned = spawn("service", "serve")
    pid = spawned.serving()
    spawned.process.kill()
    spawned.until(lambda: not alive(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_is_passed_on_once_and_the_exit_code_is_the_services(
    spawn: Callable[..., Spawned], number: signal.Signals
) -> None:
    spawned = spawn("service", "serve")
    pid = spawned.serving()
    assert os.getpgid(pid) == pid, "two signals at once may be heard as one"
    os.killpg(spawned.process.pid, number)  # as a terminal does
    assert spawned.process.wait(DEADLINE_S) == 0, spawned.output()
    assert "heard 1" in spawned.output()
    assert "died" not in spawned.output()


def test_a_hangup_is_passed_on_and_ends_nothing(spawn: Callable[..., Spawned]) -> None:
    spawned = spawn("service", "serve")
    pid = spawned.serving()
    spawned.process.send_signal(signal.SIGHUP)
    spawned.until(lambda: "reloaded" in spawned.output())
    assert alive(pid)


@pytest.mark.parametrize("code", [0, 2, 78])
def test_an_end_that_a_fork_does_not_mend_ends_the_spawner_with_the_same_code(
    spawn: Callable[..., Spawned], code: int
) -> None:
    spawned = spawn("service", f"exit{code}")
    assert spawned.process.wait(DEADLINE_S) == code
    assert "died" not in spawned.output()


@pytest.mark.parametrize(("how", "code"), [("exit1", 1), ("die", 128 + signal.SIGKILL)])
def test_a_service_that_is_never_ready_ends_its_spawner(
    spawn: Callable[..., Spawned], how: str, code: int
) -> None:
    spawned = spawn("service", how)
    assert spawned.process.wait(DEADLINE_S) == code
    assert spawned.output().count("service died pid=") == 5


def test_a_process_with_threads_is_not_forked_and_becomes_the_service(
    spawn: Callable[..., Spawned],
) -> None:
    spawned = spawn("service", "threaded")
    assert spawned.serving() == spawned.process.pid
    assert "there are threads" in spawned.output()
    spawned.process.terminate()
    assert spawned.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("package", ["gpu_worker", "gateway", "scheduler_svc"])
def test_no_import_of_a_real_service_starts_a_thread_before_the_fork(
    spawn: Callable[..., Spawned], package: str
) -> None:
    # As many threads as there are cores, in any library that would start them.
    free = {name: "" for name in os.environ if name.endswith("_NUM_THREADS")}
    settings = {
        "PAGESTREAM_MODEL": str(REPOSITORY / "models" / "demo"),
        "PAGESTREAM_DEVICE": "cpu",
        "REDIS_URL": "redis://127.0.0.1:1/0",  # no server listens there
        KERNEL_CACHE: str(kernel_cache()),
    }
    spawned = spawn(package, environ=settings | free)
    spawned.until(lambda: forked_by(spawned.process.pid) is not None)
    maps = Path(f"/proc/{spawned.process.pid}/maps").read_text()
    assert ("libtorch" in maps) == (package == "gpu_worker")
    assert len(os.listdir(f"/proc/{spawned.process.pid}/task")) == 1
    assert "there are threads" not in spawned.output()


@pytest.mark.parametrize("package", ["gpu_worker", "gateway", "scheduler_svc"])
def test_a_bad_setting_is_reported_before_slow_imports(
    spawn: Callable[..., Spawned], package: str
) -> None:
    spawned = spawn(package, "--log-level", "loud")
    assert spawned.process.wait(DEADLINE_S) == 2
    assert "--log-level='loud'" in spawned.output()
