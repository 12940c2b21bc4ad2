"""``scripts/fleet``: a fleet on one machine: engines, each with a Redis, and gateways of them all.

    scripts/fleet --engines 3 --gateways 2 --model smollm2
    scripts/fleet --model demo=2 --model smollm2

--model may be given several times, each with the number of its engines behind a "="; without one,
the model has as many as --engines. The first gateway listens on --port, the next ones on the ports
behind it. Each engine has a scheduler, workers and a Redis of its own; one more Redis has the
directory. All other settings are those of scripts/serve, and hold for all engines. A scheduler that
gets SIGTERM hands its requests over to the other engines with its model and is started again:
`kill $(cat .pagestream/fleet/run/engine-0-scheduler.pid)`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.known_models import make_model
from deploy.options import Options, find_model, read_options
from deploy.processes.signals import Signals
from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_server_for, private_endpoint
from deploy.redis.server_probe import redis_is_ready
from deploy.service_group import GRACE_S, IDLE_S, POLL_S, ServiceGroup
from deploy.service_probe import http_url, is_ready, ready_models
from deploy.state_dir import StateDir
from deploy.terminal import Terminal
from deploy.worker_ranks import rank_environments
from shared.cpu_priority import never_preempt_others
from shared.errors import PageStreamError, SettingsError
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from shared.model_name import model_name
from shared.settings import exit_with
from shared.state_folder import DEFAULT_STATE_DIR

_SPAWNER = (sys.executable, "-m", "deploy.processes.spawner")
_MOST = 100
_NO_PORT = {
    "PAGESTREAM_GATEWAY_METRICS_PORT": "0",
    "PAGESTREAM_SCHEDULER_METRICS_PORT": "0",
    "PAGESTREAM_WORKER_METRICS_PORT": "0",
}


def main() -> int:
    """Start, serve and drain; the exit code."""
    args, others = _parser().parse_known_args()
    try:
        options = read_options(others, os.environ)
        given = args.model or [options.gateway.model]
        models = [_model_and_count(text, args.engines) for text in given]
        name = options.gateway.served_model_name
        if name is not None and len(models) > 1:
            raise SettingsError("--served-model-name", name, "several models would have this name")
    except SettingsError as error:
        exit_with(error)
    never_preempt_others()  # Redis inherits it
    terminal = Terminal()
    folder = options.launcher.state_dir or f"{DEFAULT_STATE_DIR}/fleet"
    try:
        with Signals() as signals, StateDir(Path(folder).absolute()) as state:
            for model, _ in models:
                make_model(model, signals, terminal)
            if signals.num_stops:
                return 0
            fleet = FleetLauncher(options, state, signals, terminal)
            engines = [model for model, count in models for _ in range(count)]
            return fleet.run(engines, args.gateways)
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
        self._services = ServiceGroup(options, state, signals, terminal, terminal.show_event)

    def run(self, models: Sequence[str], num_gateways: int) -> int:
        """Serve until a signal to stop; the exit code.

        Args:
            models: of each engine, its folder, file or hub id.
        """
        served_name = self._options.gateway.served_model_name
        names = [model_name(model, served_name) for model in models]
        try:
            directory = self._start_redis("directory-redis")
            for number, (model, name) in enumerate(zip(models, names, strict=True)):
                self._start_engine(f"engine-{number}", model, directory.url)
                self._terminal.show(f"engine-{number} is to serve {name}")
            ports = [self._start_gateway(number, directory.url) for number in range(num_gateways)]
            self._until(lambda: all(self._is_ready(port, set(names)) for port in ports), POLL_S)
            if not self._signals.num_stops:
                host = self._options.gateway.host
                urls = " and ".join(http_url(host, port) for port in ports)
                served = " and ".join(dict.fromkeys(names))
                logs = self._state.path / "log"
                self._terminal.show(f"ready: {urls}, of {served}; logs in {logs}")
            self._until(lambda: False, IDLE_S)
        except BaseException:
            self._services.kill()
            raise
        kinds = ("gateway", "scheduler", "worker", "redis")
        by_kind = [[name for name in self._services.by_name if kind in name] for kind in kinds]
        return 0 if self._services.stop(*by_kind) else 1

    def _is_ready(self, port: int, names: set[str]) -> bool:
        host = self._options.gateway.host
        return is_ready(host, port) and ready_models(host, port) in (None, names)

    def _start_engine(self, name: str, model: str, directory_url: str) -> None:
        environ = self._environ | {
            "REDIS_URL": self._start_redis(f"{name}-redis").url,
            "PAGESTREAM_ENGINE_ID": name,
            "PAGESTREAM_MODEL": model,
            "PAGESTREAM_DIRECTORY_URL": directory_url,
        }
        self._start(f"{name}-scheduler", [*_SPAWNER, "scheduler_svc"], environ)
        for worker, own in rank_environments(self._options):
            self._start(f"{name}-{worker}", [*_SPAWNER, "gpu_worker"], environ | own | _NO_PORT)

    def _start_gateway(self, number: int, directory_url: str) -> int:
        first = self._options.gateway.port
        port = first + number if first else free_port()
        environ = self._environ | {
            "REDIS_URL": directory_url,
            "PAGESTREAM_DIRECTORY_URL": directory_url,
            "PAGESTREAM_PORT": str(port),
        }
        environ.pop("PAGESTREAM_MODEL", None)  # it serves all those of the directory
        self._start(f"gateway-{number}", [*_SPAWNER, "gateway"], environ)
        return port

    def _start_redis(self, name: str) -> Endpoint:
        folder = self._state.path / name
        folder.mkdir(mode=0o700, exist_ok=True)
        server, endpoint = find_server_for(folder), private_endpoint(folder)
        command = configure(server.path, endpoint, folder, self._state.log(name))
        self._start(name, command, self._environ)
        self._until(lambda: redis_is_ready(endpoint), POLL_S)
        return endpoint

    def _start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        grace_s = GRACE_S + self._options.gateway.drain_timeout
        self._services.start(name, command, environ, grace_s)

    def _until(self, done: Callable[[], bool], poll_s: float) -> None:
        """Keep services running until ``done``, or until a signal to stop.

        Raises:
            PageStreamError: a service does not start.
        """

        def settled() -> bool:
            for name, supervisor in self._services.by_name.items():
                if supervisor.keeps_failing:
                    tail = "\n".join(supervisor.last_lines)
                    raise PageStreamError(f"{name} does not start:\n{tail}")
            return done()

        self._services.until(settled, poll_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scripts/serve --help lists all other settings.",
        allow_abbrev=False,
    )
    about = "a model, and the number of its engines; may be given several times"
    parser.add_argument("--model", action="append", metavar="MODEL[=ENGINES]", help=about)
    about = "engines of each model that gives no number (default 2)"
    parser.add_argument("--engines", type=_count, default=2, metavar="N", help=about)
    about = "gateways to start (default 1)"
    parser.add_argument("--gateways", type=_count, default=1, metavar="N", help=about)
    return parser


def _model_and_count(text: str, default: int) -> tuple[str, int]:
    """The folder, file or hub id of a model, and the number of its engines.

    Raises:
        SettingsError: there is no such model, or the number is too large or too small.
    """
    model, _, number = text.rpartition("=")
    if not (model and number.isdecimal()):
        return find_model(text), default
    if not 1 <= int(number) <= _MOST:
        raise SettingsError("--model", text, f"1 to {_MOST} engines are expected")
    return find_model(model), int(number)


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {_MOST}")
    return number


if __name__ == "__main__":
    sys.exit(main())
