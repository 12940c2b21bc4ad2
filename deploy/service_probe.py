"""Requests that the launcher sends to running services, with short timeouts."""

import http.client
import json

from gateway.settings import GatewaySettings

_TIMEOUT_S = 1.0


def is_ready(host: str, port: int) -> bool:
    """Whether a gateway reports that it would serve requests."""
    try:
        return _get(host, port, "/health/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def ready_models(host: str, port: int) -> set[str] | None:
    """Names of the models that a gateway would serve; None: it needs a key to name them."""
    try:
        status, body = _get(host, port, "/v1/models")
    except (OSError, http.client.HTTPException):
        return set()
    if status != 200:
        return None
    return {card["id"] for card in json.loads(body)["data"] if card["ready"]}


def health_address(settings: GatewaySettings) -> tuple[str, int]:
    """Host and port of a gateway's health checks, preferably of those that need no key."""
    if settings.gateway_metrics_port:
        return settings.gateway_metrics_host, settings.gateway_metrics_port
    return settings.host, settings.port


def reachable_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def http_url(host: str, port: int) -> str:
    """URL of a server that listens on ``host``, as reached from this machine."""
    reached = reachable_host(host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
