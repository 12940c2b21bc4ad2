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

# Connections are given higher numbers by Linux (32768 up), and by other systems (49152 up).
_FIRST_PORT = 10_000
_NUM_PORTS = 20_000
_TRIES = 200


@dataclass(frozen=True, slots=True)
class Wanted:
    """An address that a service is going to listen on; ``setting`` is what chose it."""

    setting: str
    host: str
    port: int


def free_port() -> int:
    """A port on loopback that nobody listens on right now.

    It is none of those that the system gives to connections: one of them could take it while the
    service that listens there is being started again, even a connection to that very service.

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
    """This port if it can be listened on and is not to be another service's, else a free one."""
    if port not in taken:
        with contextlib.suppress(OSError), _listen(Wanted("", host, port)):
            return port
    return free_port()


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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; whatever it is, others may know it
        return False


def _listen(want: Wanted) -> socket.socket:
    family = socket.AF_INET6 if ":" in want.host else socket.AF_INET
    return socket.create_server((want.host, want.port), family=family)
