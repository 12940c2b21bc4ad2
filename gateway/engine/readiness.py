"""Whether this gateway would serve a request, from progress and not from a port that is open."""

from starlette.responses import JSONResponse, Response

from gateway.http.errors import ApiError, unavailable
from gateway.models.served_model import ServedModel
from gateway.service import ReadyLimits, Service


def readiness(service: Service) -> Response:
    """200, or 503 with the check that failed."""
    check, error = _first_failed(service)
    if error is None:
        return JSONResponse({"status": "ready"})
    body = {"status": "not ready", "check": check, "detail": str(error)}
    return JSONResponse(body, error.status, error.headers)


def status_alone(response: Response) -> Response:
    """The same status without a body."""
    retry_after = response.headers.get("retry-after")
    headers = None if retry_after is None else {"Retry-After": retry_after}
    return Response(status_code=response.status_code, headers=headers)


def _first_failed(service: Service) -> tuple[str, ApiError | None]:
    error = service.why_not_ready()
    if error is not None:
        return "gateway" if service.draining else "engine", error
    failed = [_failed_of(model, service.ready_limits) for model in service.models.served]
    passed = any(error is None for _, error in failed)
    return ("", None) if passed else failed[0]


def _failed_of(model: ServedModel, limits: ReadyLimits) -> tuple[str, ApiError | None]:
    """The same for calls of one model."""
    error = model.why_not_ready()
    if error is not None:
        return "engine", error
    engine = model.ready
    if engine is not None and engine.stalled_ms > limits.stall_ms:
        return "steps", unavailable(
            f"the engine has work and has made no step for {engine.stalled_ms} ms"
        )
    lag_s = model.engine.log_lag_s
    if lag_s > limits.log_lag_s:
        return "log", unavailable(f"the log of outputs was not read for {lag_s:.1f} s")
    return "", None
