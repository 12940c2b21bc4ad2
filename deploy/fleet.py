"""``scripts/fleet``: a fleet on one machine: several engines, each with a Redis, and gateways.

    scripts/fleet --engines 3 --gateways 2 --model smollm2

The first gateway listens on --port, the next ones on the ports behind it. Each engine has a
scheduler, a worker and a Redis of its own; one more Redis has the directory. All other settings are
those of scripts/serve. A scheduler that gets SIGTERM hands its requests over to the other engines
and is started again: `kill $(cat .pagestream/fleet/run/engine-0-scheduler.pid)`.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.known_models import make_model
from deploy.log_files import rotate_if_large
from deploy.options import Options, find_model, read_options
from deploy.processes.signals import Signals
from deploy.processes.supervisor import Event, Service, State, Supervisor
from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_server_for, private_endpoint
from deploy.redis.server_probe import redis_is_ready
from deploy.service_probe import http_url, is_ready
from deploy.state_dir import StateDir
from deploy.terminal import Terminal
from shared.cpu_priority import never_preempt_others
from shared.errors import PageStreamError, SettingsError
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from shared.settings import exit_with
from shared.state_folder import DEFAULT_STATE_DIR

_SPAWNER = (sys.executable, "-m", "deploy.processes.spawner")
_STOP_ORDER = ("gateway", "scheduler", "worker", "redis")
_GRACE_S = 15.0
_POLL_S = 0.1
_IDLE_S = 5.0
_PRIVATE = 0o077
_NO_PORT = {
    "PAGESTREAM_GATEWAY_METRICS_PORT": "0",
    "PAGESTREAM_SCHEDULER_METRICS_PORT": "0",
    "PAGESTREAM_WORKER_METRICS_PORT": "0",
}


def main() -> int:
    """Start, serve and drain; the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scripts/serve --help lists all other settings.",
    )
    parser.add_argument("--engines", type=_count, default=2, help="engines to start (default 2)")
    parser.add_argument("--gateways", type=_count, default=1, help="gateways to start (default 1)")
    args, others = parser.parse_known_args()
    try:
        options = read_options(others, os.environ)
        model = find_model(options.gateway.model)
    except SettingsError as error:
        exit_with(error)
    never_preempt_others()  # Redis inherits it
    terminal = Terminal()
    folder = options.launcher.state_dir or f"{DEFAULT_STATE_DIR}/fleet"
    try:
        with Signals() as signals, StateDir(Path(folder).absolute()) as state:
            make_model(model, signals, terminal)
            if signals.num_stops:
                return 0
            options = dataclasses.replace(
                options, environ=dict(options.environ) | {"PAGESTREAM_MODEL": model}
            )
            fleet = FleetLauncher(options, state, signals, terminal)
            return fleet.run(args.engines, args.gateways)
    except PageStreamError as error:
        terminal.warn(f"error: {error}")
        return 2 if isinstance(error, SettingsError) else 1


class FleetLauncher:
    """All services of a fleet."""

    def __init__(
        self, options: Options, state: StateDir, signals: Signals, terminal: Terminal
    ) -> None:
        self._options = options
        self._state = state
        self._signals = signals
        self._terminal = terminal
        self._environ = dict(options.environ) | _NO_PORT
        self._environ.setdefault(KERNEL_CACHE, str(kernel_cache(options.environ)))
        self._services: dict[str, Supervisor] = {}

    def run(self, num_engines: int, num_gateways: int) -> int:
        """Serve until a signal to stop; the exit code."""
        try:
            directory = self._start_redis("directory-redis")
            for number in range(num_engines):
                self._start_engine(f"engine-{number}", directory.url)
            ports = [self._start_gateway(number, directory.url) for number in range(num_gateways)]
            host = self._options.gateway.host
            self._until(lambda: all(is_ready(host, port) for port in ports), _POLL_S)
            if not self._signals.num_stops:
                urls = " and ".join(http_url(host, port) for port in ports)
                self._terminal.show(f"ready: {urls}; logs in {self._state.path / 'log'}")
            self._until(lambda: False, _IDLE_S)
        except BaseException:
            self._kill_all()
            raise
        return self._drain()

    def _start_engine(self, name: str, directory_url: str) -> None:
        endpoint = self._start_redis(f"{name}-redis")
        environ = self._environ | {
            "REDIS_URL": endpoint.url,
            "PAGESTREAM_ENGINE_ID": name,
            "PAGESTREAM_DIRECTORY_URL": directory_url,
        }
        self._start(f"{name}-scheduler", [*_SPAWNER, "scheduler_svc"], environ)
        self._start(f"{name}-worker", [*_SPAWNER, "gpu_worker"], environ)

    def _start_gateway(self, number: int, directory_url: str) -> int:
        first = self._options.gateway.port
        port = first + number if first else free_port()
        environ = self._environ | {
            "REDIS_URL": directory_url,
            "PAGESTREAM_DIRECTORY_URL": directory_url,
            "PAGESTREAM_PORT": str(port),
        }
        self._start(f"gateway-{number}", [*_SPAWNER, "gateway"], environ)
        return port

    def _start_redis(self, name: str) -> Endpoint:
        folder = self._state.path / name
        folder.mkdir(mode=0o700, exist_ok=True)
        server, endpoint = find_server_for(folder), private_endpoint(folder)
        command = configure(server.path, endpoint, folder, self._state.log(name))
        self._start(name, command, self._environ)
        self._until(lambda: redis_is_ready(endpoint), _POLL_S)
        return endpoint

    def _start(self, name: str, command: Sequence[str], environ: dict[str, str]) -> None:
        grace_s = _GRACE_S + self._options.gateway.drain_timeout
        umask = _PRIVATE if name.endswith("redis") else -1
        log, pid_file = self._state.log(name), self._state.pid_file(name)
        service = Service(name, command, environ, log, pid_file, grace_s, umask)
        supervisor = Supervisor(service, self._show, self._options.scheduler.worker_patience)
        self._services[name] = supervisor
        supervisor.start(time.monotonic())

    def _show(self, event: Event) -> None:
        self._terminal.show_event(event)

    def _until(self, done: Callable[[], bool], poll_s: float) -> None:
        """Keep services running until ``done``, or until a signal to stop."""
        while not self._signals.num_stops and not done():
            for name, supervisor in self._services.items():
                if supervisor.keeps_failing:
                    tail = "\n".join(supervisor.last_lines)
                    raise PageStreamError(f"{name} does not start:\n{tail}")
            self._wait_and_tick(poll_s)

    def _wait_and_tick(self, longest_s: float) -> None:
        now = time.monotonic()
        due = [s.next_deadline for s in self._services.values() if s.next_deadline is not None]
        messages = [s.messages for s in self._services.values() if s.messages is not None]
        self._signals.wait(min([longest_s, *(deadline - now for deadline in due)]), messages)
        for supervisor in self._services.values():
            supervisor.tick(time.monotonic())
            rotate_if_large(supervisor.service.log, self._options.launcher.max_log_bytes)

    def _drain(self) -> int:
        self._terminal.show("stopping; press Ctrl-C again to end everything at once")
        for kind in _STOP_ORDER:
            stopping = [found for name, found in self._services.items() if kind in name]
            for supervisor in stopping:
                supervisor.stop(time.monotonic())
            while any(found.state is State.STOPPING for found in stopping):
                if self._signals.num_stops > 1:
                    self._kill_all()
                    return 1
                self._wait_and_tick(_IDLE_S)
        return 0

    def _kill_all(self) -> None:
        for supervisor in self._services.values():
            supervisor.stop(time.monotonic())
            supervisor.kill()
        while any(s.state is State.STOPPING for s in self._services.values()):
            self._wait_and_tick(_POLL_S)


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 100:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to 100")
    return number


if __name__ == "__main__":
    sys.exit(main())
