"""TCP ports of this machine."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shared.errors import PageStreamError


@dataclass(frozen=True, slots=True)
class Wanted:
    """An address that a service is going to listen on; ``setting`` is what chose it."""

    setting: str
    host: str
    port: int


def free_port() -> int:
    """A port on loopback that nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def check_ports(wanted: Sequence[Wanted]) -> None:
    """Prove that all addresses can be listened on at the same time.

    Raises:
        PageStreamError: names the setting, and why its address cannot be used.
    """
    with ExitStack() as probes:  # all stay open, so that two services cannot want the same port
        for want in wanted:
            try:
                probes.enter_context(_listen(want))
            except OSError as error:
                # A positive number is the system's own; others are about the host's name.
                number = error.errno or 0
                reason = os.strerror(number) if number > 0 else error.strerror or str(error)
                raise PageStreamError(
                    f"{want.setting}={want.port}: cannot listen on {want.host}: {reason}"
                ) from None


def _listen(want: Wanted) -> socket.socket:
    family = socket.AF_INET6 if ":" in want.host else socket.AF_INET
    return socket.create_server((want.host, want.port), family=family)
