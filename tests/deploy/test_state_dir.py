"""One launcher per state folder, and the remains of a killed one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.state_dir import StateDir
from shared.errors import PageStreamError
from shared.state_folder import redis_url_file
from tests.deploy.running import alive


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait(10)


def test_a_second_launcher_is_refused_with_the_process_id_of_the_first(tmp_path: Path) -> None:
    with (
        StateDir(tmp_path),
        pytest.raises(PageStreamError, match=rf"in use by process {os.getpid()}\b"),
        StateDir(tmp_path),
    ):
        pass


def test_a_folder_that_was_left_can_be_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        with StateDir(tmp_path):
            assert (tmp_path / "run" / "serve.pid").read_text() == f"{os.getpid()}\n"
    assert (tmp_path / "run" / "serve.pid").read_text() == ""


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(PageStreamError, match="state"), StateDir(tmp_path / "state"):
        pass


@pytest.mark.parametrize("text", ["", "abc", "999999999\n"])
def test_a_pid_file_without_a_process_is_removed(tmp_path: Path, text: str) -> None:
    stale = tmp_path / "run" / "worker.pid"
    stale.parent.mkdir()
    stale.write_text(text)
    with StateDir(tmp_path):
        assert not stale.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_service_that_outlived_its_launcher_is_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    left = tmp_path / "run" / "redis.pid"
    left.parent.mkdir()
    left.write_text(str(sleeper.pid))
    with StateDir(tmp_path):
        assert sleeper.wait(10) == -9
        assert not left.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_start_waits_for_the_process_that_a_killed_spawner_had_forked(tmp_path: Path) -> None:
    # The fork is in a process group of its own, as a spawner's is, and is not killed here.
    lines = (
        "import os, sys, time",
        "if os.fork() == 0:",
        "    os.setpgid(0, 0)",
        "    print(os.getpid(), flush=True)",
        "    sys.stdin.read()",
        "    os._exit(0)",
        "time.sleep(60)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as spawner:
        assert spawner.stdin
        assert spawner.stdout
        fork = int(spawner.stdout.readline())
        left = tmp_path / "run" / "worker.pid"
        left.parent.mkdir()
        left.write_text(str(spawner.pid))
        spawner.kill()
        spawner.wait(10)
        pause, pauses = time.sleep, []

        def wait(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                spawner.stdin.close()  # the fork ends
            pause(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", wait)
            with StateDir(tmp_path):
                assert len(pauses) >= 3
                assert not alive(fork)
                assert not left.exists()


def test_a_process_that_only_has_the_same_id_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    stale = tmp_path / "run" / "redis.pid"
    stale.parent.mkdir()
    stale.write_text(str(sleeper.pid))
    os.utime(stale, (1_600_000_000, 1_600_000_000))
    with StateDir(tmp_path):
        assert not stale.exists()
    assert sleeper.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_service_that_may_not_be_ended_is_named(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "run" / "redis.pid"
    left.parent.mkdir()
    left.write_text(str(sleeper.pid))

    def refuse(*_: int) -> None:  # as for a process of another user
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    problem = rf"process {sleeper.pid} .* cannot be ended: Operation not permitted \(.*redis.pid\)"
    with pytest.raises(PageStreamError, match=problem), StateDir(tmp_path):
        pass


def test_logs_of_the_start_before_are_kept_beside_the_new_ones(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        state.log("worker").write_text("old")
    with StateDir(tmp_path) as state:
        assert not state.log("worker").exists()
        assert (tmp_path / "log" / "worker.log.1").read_text() == "old"


def test_the_place_of_redis_is_for_its_user_alone(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        file = redis_url_file(tmp_path)
        file.write_text("redis://of-an-earlier-start/0")
        file.chmod(0o644)
        state.record_redis_url("redis://:secret@far:1/0")
        assert file.read_text() == "redis://:secret@far:1/0\n"
        assert file.stat().st_mode & 0o777 == 0o600
