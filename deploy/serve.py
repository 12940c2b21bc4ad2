"""``scripts/serve``: a whole PageStream on one machine.

This module and all it imports need nothing but Python itself, so that ``--help`` answers before
anything is installed.
"""

import dataclasses
import os
import sys

from deploy.known_models import make_model
from deploy.launcher import Launcher
from deploy.options import Options, find_model, read_options
from deploy.ports import Wanted, check_ports, free_port
from deploy.signals import Signals
from deploy.state_dir import StateDir
from deploy.terminal import Terminal
from shared.cpu_turns import wait_for_turns
from shared.errors import PageStreamError, SettingsError
from shared.settings import exit_with


def main() -> int:
    """Start, serve, drain; returns the exit code."""
    try:
        options = resolve(read_options(sys.argv[1:], os.environ))
    except SettingsError as error:
        exit_with(error)
    wait_for_turns()  # Redis inherits it
    terminal = Terminal()
    try:
        with Signals() as signals, StateDir(options.launcher.state_path) as state:
            check_ports(listeners(options))
            make_model(options.gateway.model, signals, terminal)
            if signals.num_stops:
                return 0
            terminal.say(f"serving {options.gateway.model}; logs in {state.path / 'log'}")
            return Launcher(options, state, signals, terminal).run()
    except PageStreamError as error:
        terminal.complain(f"error: {error}")
        return 1


def resolve(options: Options) -> Options:
    """The same with what the services must agree on decided: the model's path, the ports."""
    port = options.gateway.port or free_port()
    model = find_model(options.gateway.model)
    environ = dict(options.environ)
    environ |= {"PAGESTREAM_MODEL": model, "PAGESTREAM_PORT": str(port)}
    gateway = dataclasses.replace(options.gateway, model=model, port=port)
    if gateway.asks_for_keys and not gateway.gateway_metrics_port:
        # The launcher has no key, and asks how the gateway is.
        gateway = dataclasses.replace(
            gateway, gateway_metrics_host="127.0.0.1", gateway_metrics_port=free_port()
        )
        environ["PAGESTREAM_GATEWAY_METRICS_HOST"] = gateway.gateway_metrics_host
        environ["PAGESTREAM_GATEWAY_METRICS_PORT"] = str(gateway.gateway_metrics_port)
    return dataclasses.replace(options, gateway=gateway, environ=environ)


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
