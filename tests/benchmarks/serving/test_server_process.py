"""Measured servers end with the measurement, whatever they do and however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.serving.server_process import NotServed, end, ready_server
from tests.deploy.running import alive

STUBBORN = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', os.getpid(), flush=True)\n"
    "time.sleep(60)\n"
)


def pid_in(log: Path) -> int:
    return int(log.read_text().split()[1])


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", STUBBORN]
    with ready_server(
        "stubborn", command, os.environ, log, lambda: "\n" in log.read_text(), 30, stop_s=0.05
    ):
        assert alive(pid_in(log))
    assert not alive(pid_in(log))


def test_ctrl_c_while_a_server_starts_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupted() -> bool:
        if "\n" in log.read_text():
            raise KeyboardInterrupt
        return False

    command = [sys.executable, "-c", STUBBORN]
    with (
        pytest.raises(KeyboardInterrupt),
        ready_server("stubborn", command, os.environ, log, interrupted, 30, stop_s=0.05),
    ):
        pass
    assert not alive(pid_in(log))


def test_a_server_that_is_not_ready_in_time_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    command = ["sh", "-c", "echo loading; exec sleep 60"]
    log = tmp_path / "log"
    with (
        pytest.raises(NotServed, match="slow does not become ready:\nloading"),
        ready_server("slow", command, os.environ, log, lambda: False, 0.5),
    ):
        pass


def test_processes_that_a_server_started_end_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", "sleep 60 & echo child $!; wait"]
    with ready_server("parent", command, os.environ, log, lambda: "\n" in log.read_text(), 30):
        pass
    deadline = time.monotonic() + 10
    while alive(pid_in(log)):
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.01)  # polling interval of the condition


def test_a_process_without_a_session_of_its_own_ends_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        end(process)
        assert process.returncode == -15
