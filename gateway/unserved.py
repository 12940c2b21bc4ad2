"""The gateway of a model that has no tokenizer: it stays up, and says what is wrong.

A gateway that exits would leave clients with a refused connection and no reason.
"""

import asyncio
import signal

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from gateway.errors import unavailable
from gateway.settings import GatewaySettings
from gateway.version import version
from shared.logs import EventLog
from shared.metrics import CONTENT_TYPE, GatewayMetrics
from shared.model_name import model_name

_log = EventLog("gateway.unserved")

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def create_unserved_app(settings: GatewaySettings, reason: str) -> FastAPI:
    """Alive and never ready: everything that needs a model is answered with 503 and the reason."""
    app = FastAPI(title="PageStream", version=version())
    metrics = GatewayMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/version")
    async def say_version() -> dict[str, str]:
        return {"version": version()}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def refuse(path: str, request: Request) -> Response:  # noqa: ARG001
        metrics.admission_rejections["no_engine"].inc()
        error = unavailable(reason)
        return JSONResponse(error.body(), error.status, error.headers)

    return app


async def serve_unserved(settings: GatewaySettings, reason: str) -> int:
    """Answer until told to leave; the exit status of the process is a failure's."""
    server = uvicorn.Server(
        uvicorn.Config(
            create_unserved_app(settings, reason),
            host=settings.host,
            port=settings.port,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
    )
    serving = asyncio.create_task(server.serve())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    url = f"http://{settings.host}:{settings.port}"
    _log.warning("answering 503 to everything", url=url, reason=reason)
    await serving
    return 1
