"""Starts, watches and stops every service of one machine.

Start: Redis (unless a setting names one), then scheduler, workers and gateway at once. Stop: the
gateway first, which lets open streams end; then the scheduler, which lets accepted requests end;
then the workers and Redis.
"""

import sys
from collections.abc import Mapping, Sequence

from deploy.options import Options
from deploy.processes.signals import Signals
from deploy.processes.supervisor import Event, GaveUp, Stopped, Supervisor
from deploy.redis.server import configure, find_server_for, private_endpoint
from deploy.redis.server_probe import delete_keys, redis_is_ready
from deploy.service_group import GRACE_S, IDLE_S, POLL_S, ServiceGroup
from deploy.service_probe import health_address, http_url, is_ready
from deploy.state_dir import StateDir
from deploy.terminal import Failure, Terminal, event_in
from deploy.worker_ranks import rank_environments, worker_names
from shared.bus.keys import EngineKeys
from shared.errors import PageStreamError
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from shared.model_name import model_name

_SPAWNER = (sys.executable, "-m", "deploy.processes.spawner")
_DRAINING = ("gateway", "scheduler")
_PROGRESS_EVERY_S = 2.0


class Launcher:
    """All services of one machine."""

    def __init__(
        self, options: Options, state: StateDir, signals: Signals, terminal: Terminal
    ) -> None:
        self._options = options
        self._state = state
        self._signals = signals
        self._terminal = terminal
        self._environ = dict(options.environ)
        self._environ.setdefault(KERNEL_CACHE, str(kernel_cache(options.environ)))
        self._services = ServiceGroup(options, state, signals, terminal, self._handle_event)
        self._failure: Failure | None = None
        self._code = 0
        self._shown: dict[str, str] = {}  # by service, the last line of its log that was shown

    def run(self) -> int:
        """Serve until a signal to stop.

        Returns:
            The exit code.

        Raises:
            PageStreamError: Redis cannot be started.
        """
        try:
            if self._options.gateway.directory_url is not None:
                self._check_redis(self._options.gateway.directory_url, "PAGESTREAM_DIRECTORY_URL")
            if self._options.own_redis:
                self._start_redis()
            else:
                self._use_redis(self._options.gateway.redis_url)
            if not self._signals.num_stops:
                self._start("scheduler", [*_SPAWNER, "scheduler_svc"])
                for name, own in rank_environments(self._options):
                    self._start(name, [*_SPAWNER, "gpu_worker"], own)
                self._start("gateway", [*_SPAWNER, "gateway"])
                self._await_ready()
            self._services.until(self._has_failed, IDLE_S)
        except BaseException:
            self._services.kill()
            raise
        workers = worker_names(self._options)
        self._services.stop(["gateway"], ["scheduler"], *([name] for name in workers), ["redis"])
        if self._failure is not None:
            self._terminal.show_failure(self._failure)
        return self._code

    def _start(
        self, name: str, command: Sequence[str], own: Mapping[str, str] | None = None
    ) -> Supervisor:
        """Start a service; ``own``: variables of its environment that others do not have."""
        drain_s = self._options.gateway.drain_timeout if name in _DRAINING else 0.0
        environ = self._environ | dict(own or {})
        return self._services.start(name, command, environ, GRACE_S + drain_s)

    def _use_redis(self, url: str) -> None:
        self._check_redis(url, "REDIS_URL")
        self._environ["REDIS_URL"] = url
        self._state.record_redis_url(url)

    def _check_redis(self, url: str, setting: str) -> None:
        # Imported late, so that --help works before redis is installed.
        from deploy.redis.external_server import check_redis

        for warning in check_redis(url, setting):
            self._terminal.warn(f"warning: {warning}")

    def _start_redis(self) -> None:
        folder = self._state.redis
        server = find_server_for(folder)
        endpoint = private_endpoint(folder, self._options.launcher.redis_port)
        log = self._state.log("redis")
        self._environ["REDIS_URL"] = endpoint.url
        self._state.record_redis_url(endpoint.url)
        redis = self._start("redis", configure(server.path, endpoint, folder, log))

        # Services of the last run have ended. A lease of theirs that had not expired is still in
        # the data, and a gateway would take its holder for alive.
        engine = EngineKeys(self._options.gateway.engine_id)
        num_ranks = self._options.worker.tensor_parallel_size
        leases = (engine.info, *map(engine.worker, range(num_ranks)))

        def settled() -> bool:
            if redis.keeps_failing:
                return True
            return redis_is_ready(endpoint) and delete_keys(endpoint, leases)

        self._services.until(settled, POLL_S)
        if redis.keeps_failing:
            raise PageStreamError(
                f"{server} does not start; if its data cannot be read, move {folder} away"
            )
        self._terminal.show(f"redis     is {server}, at {endpoint.places}")

    def _await_ready(self) -> None:
        """Wait until the gateway would serve requests, and print one line."""
        gateway = self._options.gateway
        next_progress_s = self._terminal.age_s + _PROGRESS_EVERY_S

        def settled() -> bool:
            nonlocal next_progress_s
            if self._terminal.age_s >= next_progress_s:
                next_progress_s += _PROGRESS_EVERY_S
                self._show_progress()
            return self._has_failed() or self._is_ready()

        self._services.until(settled, POLL_S)
        if self._signals.num_stops or self._has_failed():
            return
        url = http_url(gateway.host, gateway.port)
        model = model_name(gateway.model, gateway.served_model_name)
        body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}'
        key = "-H 'Authorization: Bearer YOUR-KEY' " if gateway.requires_keys else ""
        self._terminal.show(
            f"ready: {url} serves {model}; try: curl {url}/v1/completions "
            f"-H 'Content-Type: application/json' {key}-d '{body}'"
        )

    def _is_ready(self) -> bool:
        """Whether the gateway would serve requests, and this machine's engine as well.

        In a fleet, a gateway is ready as soon as any engine is.
        """
        gateway = self._options.gateway
        if not is_ready(*health_address(gateway)):
            return False
        if gateway.directory_url is None:
            return True
        # Imported late, so that --help works before packages are installed.
        from deploy.health import is_engine_ready

        return is_engine_ready(self._environ["REDIS_URL"], gateway.engine_id)

    def _show_progress(self) -> None:
        """Print the last line of the workers' and the gateway's logs, where it is a new one."""
        for name in (*worker_names(self._options), "gateway"):
            supervisor = self._services.by_name[name]
            last = supervisor.log_tail(1) or ["importing packages"]
            if last[0] != self._shown.get(name):
                self._shown[name] = last[0]
                state = supervisor.state.name.lower()
                self._terminal.show(f"{name:<9} is {state}: {event_in(last[0])}")

    def _handle_event(self, event: Event) -> None:
        self._terminal.show_event(event)
        if isinstance(event, Stopped) and event.killed:
            self._code = self._code or 1
        if isinstance(event, GaveUp) and self._failure is None:
            self._code = event.code
            self._failure = Failure(event.service, event.how, event.log_tail)

    def _has_failed(self) -> bool:
        """Whether a service cannot run, so that the launcher must end."""
        for name, supervisor in self._services.by_name.items():
            if supervisor.keeps_failing and self._failure is None:
                self._code = 1
                how = f"{supervisor.num_deaths} deaths before it was ready"
                self._failure = Failure(name, how, supervisor.last_lines)
        return self._failure is not None
