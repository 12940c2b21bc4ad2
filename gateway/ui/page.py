"""Serves ``/`` and the files that its page loads; no other path reaches the disk."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # The page may load its own files and call this server, and run nothing that is in a text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Another version of the gateway may answer next; unchanged files are 304.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, held in memory.

    Attributes:
        etag: a hash of its bytes, in quotes.
    """

    data: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "StaticFile":
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        return cls(data, _MEDIA_TYPES[path.suffix], etag)

    def answer(self, request: Request) -> Response:
        """The response to a GET or HEAD."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(self.data, headers=headers, media_type=self.media_type)


def _path_of(name: str) -> str:
    return "/" if name == _INDEX else f"/ui/{name}"


UI_PATHS = tuple(sorted(_path_of(path.name) for path in _FOLDER.iterdir()))
"""Paths of the page and its files. They hold no secret, and browsers send no key for them."""


def ui_router() -> APIRouter:
    """The page and its files."""
    router = APIRouter()
    for path in sorted(_FOLDER.iterdir()):
        router.add_api_route(
            _path_of(path.name),
            _endpoint(StaticFile.read(path)),
            methods=["GET", "HEAD"],
            include_in_schema=False,
        )
    return router


def _endpoint(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def show_file(request: Request) -> Response:
        return file.answer(request)

    return show_file
