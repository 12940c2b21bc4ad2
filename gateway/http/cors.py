"""Cross-origin calls: what browsers need to let pages of other origins use the gateway."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

_EXPOSED = ("X-Request-Id", "X-Stream-URL", "Retry-After", "X-Should-Retry")
_PREFLIGHT_S = 600  # that browsers may remember an answer


def allow_origins(app: FastAPI, origins: str | None) -> None:
    """Let pages of these origins call, and read the answers, errors included.

    Keys stand in a header and not in cookies, so credentials need not be allowed.

    Args:
        origins: with commas between them, or ``*``; None for none.
    """
    if origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.split(","),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],  # official clients send headers of their own
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_S,
        )
