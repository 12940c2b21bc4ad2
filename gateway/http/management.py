"""Metrics and health on a port of their own, without an API key."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.engine.readiness import status_alone
from shared.metrics import CONTENT_TYPE, GatewayMetrics


def management_app(metrics: GatewayMetrics, ready: Callable[[], Response]) -> Starlette:
    """An application with ``management_routes`` only."""
    return Starlette(routes=management_routes(metrics, ready))


def management_routes(metrics: GatewayMetrics, ready: Callable[[], Response]) -> list[Route]:
    """``/metrics``, ``/health``, ``/health/live`` and ``/health/ready``, by GET and HEAD.

    Args:
        ready: makes the answer of ``/health/ready``.
    """

    async def show_metrics(request: Request) -> Response:  # noqa: ARG001
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def show_alive(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"status": "alive"})

    async def show_ready(request: Request) -> Response:  # noqa: ARG001
        return ready()

    async def show_status(request: Request) -> Response:  # noqa: ARG001
        return status_alone(ready())

    return [
        Route("/health", show_status),
        Route("/metrics", show_metrics),
        Route("/health/live", show_alive),
        Route("/health/ready", show_ready),
    ]
