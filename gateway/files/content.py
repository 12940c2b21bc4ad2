"""Sends the content of a file, as fast as its client reads it."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.engine.backoff import Backoff
from gateway.files.records import FileInfo
from gateway.files.store import FileStore
from shared.bus.api import START, EntryId
from shared.errors import BusUnavailable

_PATIENT_ATTEMPTS = 30  # of a second each


class FileContent(Response):
    """The bytes of a file, read from Redis while they are sent.

    If Redis loses some of them, the connection ends before the announced length.
    """

    def __init__(self, store: FileStore, info: FileInfo) -> None:
        headers = {"Content-Length": str(info.num_bytes)}
        super().__init__(media_type="application/octet-stream", headers=headers)
        self._store = store
        self._info = info
        self._after: EntryId = START

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        backoff, num_failures = Backoff(), 0
        while True:
            try:
                await self._send_pieces(send)
                break
            except BusUnavailable:
                num_failures += 1
                if num_failures > _PATIENT_ATTEMPTS:
                    raise
                await backoff.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send) -> None:
        async for place, data in self._store.pieces(self._info.id, self._after):
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._after = place
