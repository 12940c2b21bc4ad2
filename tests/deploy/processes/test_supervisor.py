"""A supervisor with real processes: shells that stand in for services."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.processes.supervisor import (
    Died,
    Event,
    GaveUp,
    Recovered,
    Respawned,
    Service,
    Started,
    State,
    Stopped,
    Supervisor,
)
from deploy.settings import REPOSITORY
from tests.deploy.running import alive

DEADLINE_S = 10.0


class Harness:
    """A supervisor with a clock that the test moves."""

    def __init__(self, folder: Path, script: str, grace_s: float, patience_s: float) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.now = 0.0
        service = Service(
            name="service",
            command=["sh", "-c", script],
            environ={"PATH": os.environ["PATH"]},
            log=folder / "service.log",
            pid_file=folder / "service.pid",
            grace_s=grace_s,
        )
        self.supervisor = Supervisor(service, self.events.append, patience_s)
        self.supervisor.start(self.now)

    def close(self) -> None:
        self.supervisor.stop(self.now)
        self.supervisor.kill()
        self.tick_until(lambda: self.supervisor.pid is None)

    def tick_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, (self.supervisor.state, self.events)
            self.supervisor.tick(self.now)

    def until(self, kind: type[Event]) -> Event:
        """Tick until an event of this kind, which must be the last one, has come."""
        seen = len(self.events)
        self.tick_until(lambda: any(isinstance(e, kind) for e in self.events[seen:]))
        return self.events[-1]

    def wait_for_log(self, text: str) -> None:
        self.tick_until(lambda: text in (self.folder / "service.log").read_text())


@pytest.fixture
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Harness]:
    def make(script: str, grace_s: float = 60.0, patience_s: float = 0.0) -> Harness:
        made = Harness(tmp_path, script, grace_s, patience_s)
        request.addfinalizer(made.close)
        return made

    return make


def test_a_started_service_has_its_pid_in_a_file(harness: Callable[..., Harness]) -> None:
    made = harness("exec sleep 60")
    assert made.events == [Started("service", made.supervisor.pid or 0)]
    assert (made.folder / "service.pid").read_text() == f"{made.supervisor.pid}\n"


def test_a_service_that_dies_is_started_again_and_its_last_words_are_reported(
    harness: Callable[..., Harness],
) -> None:
    made = harness("echo out; echo no memory >&2; exit 3")
    died = made.until(Died)
    assert isinstance(died, Died)
    assert (died.how, list(died.log_tail)) == ("exit code 3", ["out", "no memory"])
    assert made.supervisor.state is State.BACKING_OFF
    assert not (made.folder / "service.pid").exists()
    made.now = made.supervisor.next_deadline or 0.0
    assert isinstance(made.until(Started), Started)


def test_a_service_whose_log_was_deleted_is_started_again(
    harness: Callable[..., Harness],
) -> None:
    made = harness("exit 1")
    (made.folder / "service.log").unlink()
    died = made.until(Died)
    assert isinstance(died, Died)
    assert died.log_tail == []


def test_nothing_is_started_before_the_back_off_has_passed(
    harness: Callable[..., Harness],
) -> None:
    made = harness("exit 1")
    died = made.until(Died)
    assert isinstance(died, Died)
    made.now += died.restart_in_s * 0.99
    made.supervisor.tick(made.now)
    assert made.supervisor.state is State.BACKING_OFF


def test_each_death_doubles_the_back_off_up_to_a_limit(harness: Callable[..., Harness]) -> None:
    made = harness("exit 1")
    delays = []
    for _ in range(10):
        died = made.until(Died)
        assert isinstance(died, Died)
        delays.append(died.restart_in_s)
        made.now += died.restart_in_s
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-2] == delays[-1] == 15.0
    assert made.supervisor.num_deaths == 10


def until_it_stays(made: Harness, stay: Path, sign: type[Event]) -> None:
    """Several deaths, and then a process that finds the file and lives: until it gives a sign."""
    for _ in range(5):
        made.until(Died)
        made.now = made.supervisor.next_deadline or 0.0
    stay.touch()
    made.until(sign)


def check_that_the_back_off_starts_anew(made: Harness) -> None:
    os.kill(made.supervisor.pid or 0, signal.SIGKILL)
    died = made.until(Died)
    assert isinstance(died, Died)
    assert died.restart_in_s == 0.1


def test_the_back_off_starts_anew_after_the_service_was_up_for_a_while(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    stay = tmp_path / "stay"
    made = harness(f"[ -e {stay} ] && exec sleep 60; exit 1")
    until_it_stays(made, stay, Started)
    made.now += 31.0
    check_that_the_back_off_starts_anew(made)


MESSAGES = "/proc/self/fd/$SPAWNER_MESSAGES_FD"


@pytest.mark.skipif(sys.platform != "linux", reason="the shell writes through /proc")
def test_the_back_off_starts_anew_as_soon_as_the_service_is_ready(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    stay = tmp_path / "stay"
    made = harness(
        f"[ -e {stay} ] && echo ready > {MESSAGES} && echo told && exec sleep 60; exit 1"
    )
    until_it_stays(made, stay, Recovered)
    check_that_the_back_off_starts_anew(made)


@pytest.mark.skipif(sys.platform != "linux", reason="the shell writes through /proc")
def test_a_spawners_messages_become_events(harness: Callable[..., Harness]) -> None:
    news = "echo ready; echo died signal SIGKILL; echo ready"
    script = f"echo the reason; {{ {news}; }} > {MESSAGES}; exec sleep 60"
    made = harness(script)
    assert made.until(Recovered) == Recovered("service", 0.0)
    died = Respawned("service", "signal SIGKILL", ["the reason"])
    assert made.events[1:] == [died, Recovered("service", 0.0)]
    assert made.supervisor.num_deaths == 1


@pytest.mark.parametrize("code", [2, 78])
def test_an_exit_code_that_a_restart_cannot_mend_ends_the_attempts(
    harness: Callable[..., Harness], code: int
) -> None:
    made = harness(f"echo 'ALiBi is not supported' >&2; exit {code}")
    gave_up = made.until(GaveUp)
    assert gave_up == GaveUp("service", f"exit code {code}", ["ALiBi is not supported"], code)
    assert made.supervisor.state is State.FAILED
    assert made.supervisor.next_deadline is None


@pytest.mark.skipif(sys.platform != "linux", reason="the shell writes through /proc")
def test_what_was_ready_once_may_come_back_for_a_while_whatever_its_exit_code(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    away = tmp_path / "away"
    made = harness(
        f"[ -e {away} ] && exit 78; echo ready > {MESSAGES}; echo up; exec sleep 60",
        patience_s=10.0,
    )
    made.wait_for_log("up")
    away.touch()
    made.supervisor.tick(made.now)
    os.kill(made.supervisor.pid or 0, signal.SIGKILL)
    made.until(Died)
    made.now += 1.0
    futile = made.until(Died)
    assert isinstance(futile, Died)
    assert futile.how == "exit code 78"
    away.unlink()
    made.now += 1.0
    made.until(Recovered)  # and the patience begins anew
    away.touch()
    os.kill(made.supervisor.pid or 0, signal.SIGKILL)
    made.until(Died)
    made.now += 9.0
    made.until(Died)
    made.now += 9.0
    made.until(Died)
    made.now += 9.0
    made.until(GaveUp)


def test_what_dies_again_and_again_before_it_is_ready_is_hopeless(
    harness: Callable[..., Harness],
) -> None:
    made = harness("echo no memory; exit 1")
    for _ in range(3):
        assert not made.supervisor.keeps_failing
        made.until(Died)
        made.now = made.supervisor.next_deadline or 0.0
    assert made.supervisor.keeps_failing
    assert list(made.supervisor.last_lines) == ["no memory"]


def test_a_killed_service_is_started_again(harness: Callable[..., Harness]) -> None:
    made = harness("exec sleep 60")
    os.kill(made.supervisor.pid or 0, signal.SIGKILL)
    died = made.until(Died)
    assert isinstance(died, Died)
    assert died.how == "signal SIGKILL"


def test_a_stopped_service_ends_in_its_own_time_and_is_not_started_again(
    harness: Callable[..., Harness],
) -> None:
    made = harness("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done")
    made.wait_for_log("up")
    made.supervisor.stop(made.now)
    assert made.until(Stopped) == Stopped("service", "exit code 0", killed=False)
    assert "bye" in (made.folder / "service.log").read_text()
    made.now += 1000
    made.supervisor.tick(made.now)
    assert made.supervisor.state is State.STOPPED


def test_a_service_that_does_not_stop_is_killed_with_all_it_started(
    harness: Callable[..., Harness],
) -> None:
    made = harness("trap '' TERM; sleep 61 & echo child $!; wait; sleep 61", grace_s=5)
    made.wait_for_log("child ")
    grandchild = int((made.folder / "service.log").read_text().split()[1])
    made.supervisor.stop(made.now)
    made.now += 5
    stopped = made.until(Stopped)
    assert stopped == Stopped("service", "signal SIGKILL", killed=True)
    made.tick_until(lambda: not alive(grandchild))


def test_a_service_that_is_stopped_while_backing_off_stays_down(
    harness: Callable[..., Harness],
) -> None:
    made = harness("exit 1")
    made.until(Died)
    made.supervisor.stop(made.now)
    assert made.supervisor.state is State.STOPPED
    assert made.supervisor.next_deadline is None


def test_output_of_an_earlier_process_is_not_part_of_the_last_lines(
    harness: Callable[..., Harness],
) -> None:
    made = harness("echo again")
    for _ in range(2):
        died = made.until(Died)
        assert isinstance(died, Died)
        assert list(died.log_tail) == ["again"]
        made.now += died.restart_in_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of a parent's death")
def test_a_service_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from deploy.processes.child import Child\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "Child(['sleep', '60'], os.environ, folder / 'log', folder / 'pid')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + DEADLINE_S
    while alive(pid):
        assert time.monotonic() < deadline
