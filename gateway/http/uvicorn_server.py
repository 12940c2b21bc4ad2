"""Configures uvicorn: connection limits, no logs of its own, no signal handlers."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from gateway.access.networks import networks_of
from gateway.http.connection_limits import BoundedHttp, ConnectionLimits
from gateway.http.connection_table import ConnectionTable
from gateway.settings import GatewaySettings

_KEEP_ALIVE_S = 75  # longer than load balancers keep idle connections
LAST_EVENTS_S = 3.0  # for the last events of open streams at shutdown


def connection_limits(settings: GatewaySettings, max_connections: int) -> ConnectionLimits:
    """The limits of connections that the settings give."""
    return ConnectionLimits(
        max_connections=max_connections,
        max_address_connections=settings.max_address_connections or max(1, max_connections // 4),
        trusted_proxies=settings.trusted_proxies,
        max_head_bytes=settings.max_head_bytes,
        idle_timeout_s=_KEEP_ALIVE_S,
        request_timeout_s=settings.request_timeout,
        write_timeout_s=settings.write_timeout,
    )


class HttpServer(uvicorn.Server):
    """Serves one application on one port.

    Signals are handled elsewhere: uvicorn would close streams too early.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, limits: ConnectionLimits) -> None:
        table = ConnectionTable(
            limits.max_connections,
            limits.max_address_connections,
            networks_of(limits.trusted_proxies),
        )
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            lifespan="off",
            ws="none",
            http=partial(BoundedHttp, limits=limits, table=table),  # type: ignore[arg-type]
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            forwarded_allow_ips=limits.trusted_proxies,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(LAST_EVENTS_S),
        )
        super().__init__(config)
        self.bound = asyncio.Event()

    @property
    def port(self) -> int:
        """The port on which it listens, once ``bound``."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            # The address is in use or not local; uvicorn has logged it.
            raise OSError("cannot listen") from None
        if self.started:
            self.bound.set()
