"""``scripts/serve``: runs all of PageStream on one machine.

This module and all that it imports need nothing but Python itself, so that ``--help`` works before
anything is installed.
"""

import dataclasses
import os
import sys

from deploy.known_models import make_model
from deploy.launcher import Launcher
from deploy.options import Options, find_model, read_options
from deploy.processes.signals import Signals
from deploy.redis.ports import Wanted, check_ports, free_port, is_loopback, prefer_port
from deploy.service_probe import health_address, http_url
from deploy.state_dir import StateDir
from deploy.terminal import Terminal
from deploy.worker_ranks import check_ranks
from shared.cpu_priority import never_preempt_others
from shared.errors import PageStreamError, SettingsError
from shared.settings import exit_with


def main() -> int:
    """Start, serve and drain; the exit code."""
    given, options = options_or_exit()
    never_preempt_others()  # Redis inherits it
    terminal = Terminal()
    try:
        state_path = given.launcher.state_path(given.gateway.port)
        with Signals() as signals, StateDir(state_path) as state:
            check_ports(listeners(options))
            make_model(options.gateway.model, signals, terminal)
            if signals.num_stops:
                return 0
            terminal.show(f"serving {options.gateway.model}; logs in {state.path / 'log'}")
            terminal.show(f"metrics   are at {', '.join(metrics_urls(options))}")
            for warning in warnings(options):
                terminal.warn(f"warning: {warning}")
            return Launcher(options, state, signals, terminal).run()
    except PageStreamError as error:
        terminal.warn(f"error: {error}")
        return 2 if isinstance(error, SettingsError) else 1


def options_or_exit() -> tuple[Options, Options]:
    """Read and resolve the settings; exits with 2 if one cannot be used."""
    try:
        given = read_options(sys.argv[1:], os.environ)
        return given, resolve(given)
    except SettingsError as error:
        exit_with(error)


def resolve(options: Options) -> Options:
    """Choose the values that the services must share: the model's path, and the ports.

    Raises:
        SettingsError: there is no such model.
    """
    check_ranks(options)
    port = options.gateway.port or free_port()
    model = find_model(options.gateway.model)
    options = _choose_metrics_ports(options, port)
    environ = dict(options.environ)
    environ |= {"PAGESTREAM_MODEL": model, "PAGESTREAM_PORT": str(port)}
    gateway = dataclasses.replace(options.gateway, model=model, port=port)
    if gateway.requires_keys and not gateway.gateway_metrics_port:
        # The launcher has no API key, but polls the gateway's health.
        gateway = dataclasses.replace(
            gateway, gateway_metrics_host="127.0.0.1", gateway_metrics_port=free_port()
        )
        environ["PAGESTREAM_GATEWAY_METRICS_HOST"] = gateway.gateway_metrics_host
        environ["PAGESTREAM_GATEWAY_METRICS_PORT"] = str(gateway.gateway_metrics_port)
    return dataclasses.replace(options, gateway=gateway, environ=environ)


def _choose_metrics_ports(options: Options, port: int) -> Options:
    """Choose free metrics ports, unless given, so that several servers can run on one machine."""
    scheduler, worker = options.scheduler, options.worker
    environ, taken = dict(options.environ), [port, options.gateway.gateway_metrics_port]
    if "scheduler_metrics_port" not in options.given:
        host, wanted = scheduler.scheduler_metrics_host, scheduler.scheduler_metrics_port
        chosen = prefer_port(host, wanted, [*taken, worker.worker_metrics_port])
        scheduler = dataclasses.replace(scheduler, scheduler_metrics_port=chosen)
        environ["PAGESTREAM_SCHEDULER_METRICS_PORT"] = str(chosen)
    if "worker_metrics_port" not in options.given:
        host, wanted = worker.worker_metrics_host, worker.worker_metrics_port
        chosen = prefer_port(host, wanted, [*taken, scheduler.scheduler_metrics_port])
        worker = dataclasses.replace(worker, worker_metrics_port=chosen)
        environ["PAGESTREAM_WORKER_METRICS_PORT"] = str(chosen)
    return dataclasses.replace(options, scheduler=scheduler, worker=worker, environ=environ)


def metrics_urls(options: Options) -> list[str]:
    """URLs of each service's ``/metrics``."""
    gateway, scheduler, worker = options.gateway, options.scheduler, options.worker
    places = (
        ("gateway", *health_address(gateway)),
        ("scheduler", scheduler.scheduler_metrics_host, scheduler.scheduler_metrics_port),
        ("worker", worker.worker_metrics_host, worker.worker_metrics_port),
    )
    return [f"{http_url(host, port)}/metrics ({name})" for name, host, port in places if port]


def warnings(options: Options) -> list[str]:
    """Warnings on settings that work, but are probably not intended."""
    gateway = options.gateway
    if gateway.requires_keys or is_loopback(gateway.host):
        return []
    return [
        f"--host {gateway.host} without --api-keys: every client that reaches this machine's port "
        f"{gateway.port} can use the model (docs/OPERATIONS.md describes how to make keys)"
    ]


def listeners(options: Options) -> list[Wanted]:
    """Every address that the services will listen on."""
    gateway, scheduler, worker = options.gateway, options.scheduler, options.worker
    return [
        want
        for want in (
            Wanted("--port", gateway.host, gateway.port),
            Wanted(
                "--gateway-metrics-port", gateway.gateway_metrics_host, gateway.gateway_metrics_port
            ),
            Wanted(
                "--scheduler-metrics-port",
                scheduler.scheduler_metrics_host,
                scheduler.scheduler_metrics_port,
            ),
            Wanted("--worker-metrics-port", worker.worker_metrics_host, worker.worker_metrics_port),
        )
        if want.port
    ]


if __name__ == "__main__":
    sys.exit(main())
