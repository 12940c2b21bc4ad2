"""Keeps one service running: restarts it when it dies, unless a restart cannot help.

    STOPPED ──> RUNNING ──> BACKING_OFF ──> RUNNING      died
                   │              └───────> STOPPED      stop requested meanwhile
                   ├──> FAILED                           by its exit code a restart is futile
                   └──> STOPPING ──> STOPPED             stop requested

Nothing here waits or reads a clock: the caller calls ``tick`` whenever a process may have ended or
``next_deadline`` has passed.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.processes.child import Child
from deploy.processes.exit_codes import FUTILE_EXIT_CODES, describe_exit
from deploy.processes.spawner_messages import DIED, READY, MessageReader

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 15.0
_HEALTHY_AFTER_S = 30.0  # unless the service reports it earlier
_TAIL_LINES = 10  # of its log that are reported with every death
_LAST_LINES = 80  # a traceback and the error before it
_DEATHS_AT_START = 3


class State(enum.Enum):
    """The state of a service; the table of transitions is at the top of this module."""

    STOPPED = enum.auto()
    RUNNING = enum.auto()
    BACKING_OFF = enum.auto()
    STOPPING = enum.auto()
    FAILED = enum.auto()


_LEGAL = {
    State.STOPPED: (State.RUNNING,),
    State.RUNNING: (State.BACKING_OFF, State.STOPPING, State.FAILED),
    State.BACKING_OFF: (State.RUNNING, State.STOPPED),
    State.STOPPING: (State.STOPPED,),
    State.FAILED: (),
}


@dataclass(frozen=True, slots=True)
class Service:
    """The command of one service and the limits on running it.

    Attributes:
        grace_s: seconds from SIGTERM until it is killed.
        umask: of its files; -1: this process's.
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    pid_file: Path
    grace_s: float
    umask: int = -1


@dataclass(frozen=True, slots=True)
class Started:
    """A process of the service was started."""

    service: str
    pid: int


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended by itself; another one will be started in ``restart_in_s``."""

    service: str
    how: str
    log_tail: Sequence[str]
    restart_in_s: float


@dataclass(frozen=True, slots=True)
class Respawned:
    """A spawner reported that its service ended by itself; it forks the service again."""

    service: str
    how: str
    log_tail: Sequence[str]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The service is ready again, ``after_s`` seconds after it died."""

    service: str
    after_s: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The process ended with this exit code, and a restart cannot help."""

    service: str
    how: str
    log_tail: Sequence[str]
    code: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process ended after a request to stop; ``killed`` if it exceeded its grace."""

    service: str
    how: str
    killed: bool


Event = Started | Died | Respawned | Recovered | GaveUp | Stopped


class Supervisor:
    """One service, with the process that runs it.

    Attributes:
        num_deaths: how often it ended by itself.
        last_lines: the end of its log when it did so last.

    Args:
        on_event: called with every event.
        patience_s: seconds for which a service that was ready once is started again although its
            exit code means that this is futile: a model's folder may be missing for a while.
    """

    def __init__(
        self, service: Service, on_event: Callable[[Event], None], patience_s: float = 0.0
    ) -> None:
        self.service = service
        self.state = State.STOPPED
        self.num_deaths = 0
        self.last_lines: Sequence[str] = ()
        self._on_event = on_event
        self._patience_s = patience_s
        self._was_ready = False
        self._futile_since: float | None = None
        self._child: Child | None = None
        self._started = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._deadline: float | None = None  # end of the back-off or of the grace
        self._killed = False
        self._died: float | None = None  # time of the last death; None once it is ready again

    @property
    def messages(self) -> MessageReader | None:
        """Messages of a spawner; when they can be read, call ``tick``."""
        return self._child.messages if self._child is not None else None

    @property
    def keeps_failing(self) -> bool:
        """Whether it has died several times and was never ready."""
        return not self._was_ready and self.num_deaths >= _DEATHS_AT_START

    @property
    def pid(self) -> int | None:
        """Process id of the running process."""
        return self._child.pid if self._child is not None else None

    @property
    def next_deadline(self) -> float | None:
        """Time at which to call ``tick`` even if no process ends."""
        return self._deadline

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines of the running process's log."""
        return self._child.log_tail(num_lines) if self._child is not None else []

    def start(self, now: float) -> None:
        """Start a process."""
        self._set_state(State.RUNNING)
        service = self.service
        self._child = Child(
            service.command, service.environ, service.log, service.pid_file, service.umask
        )
        self._started = now
        self._deadline = None
        self._on_event(Started(service.name, self._child.pid))

    def stop(self, now: float) -> None:
        """Send SIGTERM; the process is killed when its grace has passed."""
        if self.state is State.RUNNING:
            self._set_state(State.STOPPING)
            self._deadline = now + self.service.grace_s
            self._running_child().terminate()
        elif self.state is State.BACKING_OFF:
            self._set_state(State.STOPPED)
            self._deadline = None

    def kill(self) -> None:
        """Kill the process at once."""
        if self.state is State.RUNNING:
            self._set_state(State.STOPPING)
        if self.state is State.STOPPING:
            self._deadline = None
            self._killed = True
            self._running_child().kill()

    def tick(self, now: float) -> None:
        """Read messages, handle an ended process, and do what is due."""
        if self._child is not None:
            for line in self._child.messages.lines():
                self._handle_message(line, now)
            code = self._child.poll()
            if code is not None:
                child, self._child = self._child, None
                self._handle_end(child, code, now)
        if self._deadline is not None and now >= self._deadline:
            if self.state is State.BACKING_OFF:
                self.start(now)
            else:
                self.kill()

    def _handle_message(self, line: str, now: float) -> None:
        what, _, how = line.partition(" ")
        if what == DIED:
            self._died = now
            self.num_deaths += 1
            self.last_lines = self._running_child().log_tail(_LAST_LINES)
            self._on_event(Respawned(self.service.name, how, self.last_lines))
        elif what == READY:
            self._delay_s = _FIRST_DELAY_S
            self._was_ready, self._futile_since = True, None
            if self._died is not None:
                self._on_event(Recovered(self.service.name, now - self._died))
                self._died = None

    def _handle_end(self, child: Child, code: int, now: float) -> None:
        name, how = self.service.name, describe_exit(code)
        self.last_lines = child.log_tail(_LAST_LINES)
        if self.state is State.STOPPING:
            self._set_state(State.STOPPED)
            self._deadline = None
            self._on_event(Stopped(name, how, self._killed))
        elif code in FUTILE_EXIT_CODES and not self._may_recover(now):
            self._set_state(State.FAILED)
            self._on_event(GaveUp(name, how, self.last_lines, code))
        else:
            if now - self._started >= _HEALTHY_AFTER_S:
                self._delay_s = _FIRST_DELAY_S
            self._set_state(State.BACKING_OFF)
            self.num_deaths += 1
            self._died = now
            self._deadline = now + self._delay_s
            self._on_event(Died(name, how, self.last_lines[-_TAIL_LINES:], self._delay_s))
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)

    def _may_recover(self, now: float) -> bool:
        """Whether to restart after an exit code that makes restarts futile."""
        if not self._was_ready:
            return False
        if self._futile_since is None:
            self._futile_since = now
        return now - self._futile_since < self._patience_s

    def _running_child(self) -> Child:
        assert self._child is not None, f"{self.service.name} is {self.state} without a process"
        return self._child

    def _set_state(self, state: State) -> None:
        assert state in _LEGAL[self.state], f"{self.service.name}: {self.state} to {state}"
        self.state = state
