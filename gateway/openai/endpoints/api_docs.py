"""Serves ``/docs``: one page that reads ``/openapi.json`` and loads nothing from other hosts."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

DOCS_PATH = "/docs"
_HEADERS = {
    # The page may load nothing but its own parts and answers of this server.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}


def docs_router() -> APIRouter:
    """``/docs``; the page asks for an API key itself, since browsers send none."""
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    router = APIRouter()

    @router.get(DOCS_PATH, include_in_schema=False)
    async def show_docs() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    return router
