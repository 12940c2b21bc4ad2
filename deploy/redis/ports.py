"""TCP ports of this machine."""

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shared.errors import PageStreamError

# Outgoing connections get higher numbers, from 32768 on Linux and from 49152 on other systems.
_FIRST_PORT = 10_000
_NUM_PORTS = 20_000
_TRIES = 200


@dataclass(frozen=True, slots=True)
class Wanted:
    """An address that a service will listen on, and the ``setting`` that chose it."""

    setting: str
    host: str
    port: int


def free_port() -> int:
    """A port on loopback on which no process listens now.

    It is below the range of outgoing connections: one of those could take the port while the
    service that listens there is restarted, even a connection to that very service.

    Raises:
        PageStreamError: no port was found.
    """
    for _ in range(_TRIES):
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise PageStreamError(
        f"no free port found from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS - 1}"
    )


def prefer_port(host: str, port: int, taken: Sequence[int]) -> int:
    """This port if it is free and not another service's, else a free one."""
    if port not in taken:
        with contextlib.suppress(OSError), _listen(Wanted("", host, port)):
            return port
    return free_port()


def check_ports(wanted: Sequence[Wanted]) -> None:
    """Check that all addresses can be listened on at the same time.

    Raises:
        PageStreamError: an address cannot be used; the error names the setting and the reason.
    """
    with ExitStack() as probes:  # all stay open, so that two services with the same port are found
        for want in wanted:
            try:
                probes.enter_context(_listen(want))
            except OSError as error:
                # Positive numbers are the operating system's; others come from resolving the
                # host's name.
                number = error.errno or 0
                reason = os.strerror(number) if number > 0 else error.strerror or str(error)
                raise PageStreamError(
                    f"{want.setting}={want.port}: cannot listen on {want.host}: {reason}"
                ) from None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name; other machines may resolve it
        return False


def _listen(want: Wanted) -> socket.socket:
    family = socket.AF_INET6 if ":" in want.host else socket.AF_INET
    return socket.create_server((want.host, want.port), family=family)
