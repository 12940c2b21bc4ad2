"""Questions that the launcher asks running services; none waits for long."""

import http.client
import socket
from collections.abc import Sequence

from gateway.settings import GatewaySettings

_TIMEOUT_S = 1.0


def redis_answers(port: int) -> bool:
    """Whether a Redis on loopback has loaded its data and takes commands."""
    return _ask_redis(port, "PING").startswith(b"+PONG")


def forget_keys(port: int, keys: Sequence[str]) -> bool:
    """Delete keys from a Redis on loopback; whether it says so."""
    return _ask_redis(port, "DEL", *keys).startswith(b":")


def is_ready(host: str, port: int) -> bool:
    """Whether a gateway says that requests would be served."""
    try:
        return _get(host, port, "/health/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def health_address(settings: GatewaySettings) -> tuple[str, int]:
    """Host and port on which a gateway says how it is, without a key if it has one for that."""
    if settings.gateway_metrics_port:
        return settings.gateway_metrics_host, settings.gateway_metrics_port
    return settings.host, settings.port


def reachable_host(host: str) -> str:
    """Where to reach a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _ask_redis(port: int, *words: str) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return connection.recv(64)
    except OSError:
        return b""


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
