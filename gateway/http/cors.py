"""CORS: allows browsers to call the gateway from pages of other origins."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

_EXPOSED = (
    "X-Request-Id",
    "Request-Id",
    "X-Stream-URL",
    "X-Engine",
    "Retry-After",
    "X-Should-Retry",
)
_PREFLIGHT_S = 600  # for which browsers may cache an answer


def allow_origins(app: FastAPI, origins: str | None) -> None:
    """Allow pages of these origins to call and to read all answers, errors included.

    API keys are sent in a header and not in cookies, so credentials need not be allowed.

    Args:
        origins: separated by commas, or ``*``; None for none.
    """
    if origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.split(","),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send headers of their own
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_S,
        )
