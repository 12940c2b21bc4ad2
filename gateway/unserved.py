"""Serves 503 with the reason if the model's tokenizer cannot be loaded.

If the process exited instead, clients would only see refused connections.
"""

import asyncio
import signal

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from gateway.access.api_keys import ApiKeys
from gateway.access.authentication import RequireKey
from gateway.http.call import AccessLog
from gateway.http.connection_limits import connections_that_fit
from gateway.http.cors import allow_origins
from gateway.http.errors import unavailable
from gateway.http.management import management_app, management_routes
from gateway.http.uvicorn_server import HttpServer, connection_limits
from gateway.settings import GatewaySettings
from shared.logs import EventLog
from shared.metrics import GatewayMetrics
from shared.model_name import model_name
from shared.version import version

_log = EventLog("gateway.unserved")

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def create_unserved_app(
    settings: GatewaySettings, keys: ApiKeys, metrics: GatewayMetrics, reason: str
) -> FastAPI:
    """An application that is alive and never ready, and answers all else with 503."""
    app = FastAPI(title="PageStream", version=version())
    metrics_keys = ApiKeys(None, settings.metrics_key, "PAGESTREAM_METRICS_KEY")
    app.add_middleware(RequireKey, keys=keys, metrics_keys=metrics_keys, metrics=metrics)
    allow_origins(app, settings.cors_origins)
    app.add_middleware(AccessLog)

    app.router.routes.extend(management_routes(metrics, lambda: _refusal(reason)))

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version()}

    @app.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def refuse(path: str, request: Request) -> Response:  # noqa: ARG001
        metrics.admission_rejections["no_engine"].inc()
        return _refusal(reason)

    return app


def _refusal(reason: str) -> Response:
    error = unavailable(reason)
    return JSONResponse(error.body(), error.status, error.headers)


async def serve_unserved(settings: GatewaySettings, reason: str) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status of the process, which is 1.

    Raises:
        SettingsError: the API keys cannot be used.
    """
    keys = ApiKeys(settings.api_keys, settings.api_key)
    name = model_name(settings.model, settings.served_model_name)
    metrics = GatewayMetrics(name, settings.engine_id)
    app = create_unserved_app(settings, keys, metrics, reason)
    limits = connection_limits(settings, connections_that_fit(settings.max_connections))
    servers = [HttpServer(app, settings.host, settings.port, limits)]
    if settings.gateway_metrics_port:
        machines = management_app(metrics, lambda: _refusal(reason))
        host, port = settings.gateway_metrics_host, settings.gateway_metrics_port
        servers.append(HttpServer(machines, host, port, limits))

    def leave() -> None:
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    serving = [asyncio.create_task(server.serve()) for server in servers]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    url = f"http://{settings.host}:{settings.port}"
    _log.warning("answering 503 to everything", url=url, reason=reason)
    await asyncio.gather(*serving)
    return 1
