"""The services of one machine: started, watched, restarted and stopped together."""

import time
from collections.abc import Callable, Mapping, Sequence

from deploy.log_files import rotate_if_large
from deploy.options import Options
from deploy.processes.signals import Signals
from deploy.processes.supervisor import Event, Service, State, Supervisor
from deploy.state_dir import StateDir
from deploy.terminal import Terminal

GRACE_S = 15.0
"""Seconds from SIGTERM until a service that finishes nothing is killed."""

POLL_S = 0.1
"""Interval of polling for conditions that send no signal."""

IDLE_S = 5.0
_PRIVATE = 0o077
_SECRETS_OF_GATEWAY = ("PAGESTREAM_API_KEY", "PAGESTREAM_METRICS_KEY")


class ServiceGroup:
    """Supervised services; names of gateways begin with "gateway", of Redis end with "redis".

    Args:
        on_event: takes what happens to processes.

    Attributes:
        by_name: in the order in which they were started.
    """

    def __init__(
        self,
        options: Options,
        state: StateDir,
        signals: Signals,
        terminal: Terminal,
        on_event: Callable[[Event], None],
    ) -> None:
        self.by_name: dict[str, Supervisor] = {}
        self._options = options
        self._state = state
        self._signals = signals
        self._terminal = terminal
        self._on_event = on_event

    def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], grace_s: float
    ) -> Supervisor:
        """Start a service.

        Args:
            grace_s: seconds from SIGTERM until it is killed.
        """
        own = dict(environ)
        if not name.startswith("gateway"):
            for secret in _SECRETS_OF_GATEWAY:
                own.pop(secret, None)
        log, pid_file = self._state.log(name), self._state.pid_file(name)
        umask = _PRIVATE if name.endswith("redis") else -1  # its files hold prompts
        service = Service(name, command, own, log, pid_file, grace_s, umask)
        supervisor = Supervisor(service, self._on_event, self._options.scheduler.worker_patience)
        self.by_name[name] = supervisor
        supervisor.start(time.monotonic())
        return supervisor

    def until(self, done: Callable[[], bool], poll_s: float) -> None:
        """Keep services running until ``done``, or until a signal to stop."""
        while not self._signals.num_stops and not done():
            self._wait_and_tick(poll_s)

    def stop(self, *stages: Sequence[str]) -> bool:
        """Stop services, those of a stage together; the others are kept running meanwhile.

        Returns:
            False if another signal arrived, and all were killed.
        """
        self._terminal.show("stopping; press Ctrl-C again to end everything at once")
        for stage in stages:
            stopping = [self.by_name[name] for name in stage if name in self.by_name]
            for supervisor in stopping:
                supervisor.stop(time.monotonic())
                if supervisor.state is State.STOPPING:
                    name, longest_s = supervisor.service.name, supervisor.service.grace_s
                    self._terminal.show(f"{name:<9} is to end, in {longest_s:g} s at most")
            while any(found.state is State.STOPPING for found in stopping):
                if self._signals.num_stops > 1:
                    self.kill()
                    return False
                self._wait_and_tick(IDLE_S)
        return True

    def kill(self) -> None:
        """End all services at once."""
        for supervisor in self.by_name.values():
            supervisor.stop(time.monotonic())
            supervisor.kill()
        while any(found.state is State.STOPPING for found in self.by_name.values()):
            self._wait_and_tick(POLL_S)

    def _wait_and_tick(self, longest_s: float) -> None:
        """Wait for a signal, a message or a deadline, then let the supervisors act."""
        now, supervisors = time.monotonic(), list(self.by_name.values())
        due = [s.next_deadline for s in supervisors if s.next_deadline is not None]
        messages = [s.messages for s in supervisors if s.messages is not None]
        self._signals.wait(min([longest_s, *(deadline - now for deadline in due)]), messages)
        for supervisor in supervisors:
            supervisor.tick(time.monotonic())
            rotate_if_large(supervisor.service.log, self._options.launcher.max_log_bytes)
