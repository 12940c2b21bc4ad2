"""Reads the body of POST /v1/files, and writes its file while it arrives."""

from contextlib import suppress

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.files.form import FormParser, PartBegan
from gateway.files.records import FOR_BATCH, FileInfo
from gateway.files.store import FileStore, FileWriter
from gateway.http.call import call_of, discard
from gateway.http.errors import MISSING_FIELD, ApiError, invalid, invalid_value, unsupported
from shared.errors import BusError

_FILE, _PURPOSE = "file", "purpose"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = (_PURPOSE, _ANCHOR, _SECONDS)
_MOST_FIELD_BYTES = 256
_MOST_NAME_CHARS = 255
_FORM_BYTES = 16 * 2**10  # around the file
_SHORTEST_S, _LONGEST_S = 3_600, 2_592_000  # as OpenAI has them


class Upload:
    """One file that arrives as a form."""

    def __init__(self, store: FileStore, request: Request) -> None:
        self._store = store
        self._request = request
        self._tenant = call_of(request).tenant
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._part = ""
        self._writer: FileWriter | None = None

    async def read(self) -> FileInfo:
        """Read the body to its end, and keep its file.

        Raises:
            ApiError: the form is refused, or there is no room.
            BusUnavailable: Redis does not answer.
        """
        body = self._request.stream()
        try:
            parser = FormParser(self._request.headers.get("content-type", ""))
            await self._check_length()
            async for chunk in body:
                for event in parser.feed(chunk):
                    await self._take(event)
            parser.close()
            return await self._finish()
        except ClientDisconnect:
            await self._discard()
            raise invalid(None, "the client left before the body was complete") from None
        except ApiError:
            await self._discard()
            if "expect" not in self._request.headers:
                with suppress(ClientDisconnect, RuntimeError):
                    await discard(body)
            raise
        except BaseException:
            await self._discard()
            raise

    async def _check_length(self) -> None:
        # The HTTP parser accepts digits alone here.
        num_bytes = int(self._request.headers.get("content-length", "0"))
        await self._store.check_room(self._tenant, max(0, num_bytes - _FORM_BYTES))

    async def _take(self, event: PartBegan | bytes) -> None:
        if isinstance(event, PartBegan):
            self._begin(event)
        elif self._part == _FILE:
            assert self._writer is not None
            await self._writer.add(event)
        else:
            value = self._fields[self._part] + event
            if len(value) > _MOST_FIELD_BYTES:
                shown = value.decode(errors="replace")
                raise invalid_value(self._part, shown, f"at most {_MOST_FIELD_BYTES} bytes")
            self._fields[self._part] = value

    def _begin(self, part: PartBegan) -> None:
        name = self._part = part.name
        if name == _FILE and part.filename is None:
            raise invalid(_FILE, f"{_FILE}: must be a file, with a filename")
        if name not in (_FILE, *_FIELDS):
            raise unsupported(name[:80], "" if part.filename is None else part.filename)
        if name in self._fields or (name == _FILE and self._writer is not None):
            raise invalid(name, f"{name}: given twice")
        if name != _FILE:
            self._fields[name] = b""
            return
        self._filename = part.filename
        self._writer = FileWriter(self._store, self._tenant)

    async def _finish(self) -> FileInfo:
        if self._writer is None or self._filename is None:
            raise invalid(_FILE, f"{_FILE}: this field is required", MISSING_FIELD)
        purpose = self._field(_PURPOSE)
        if purpose is None:
            raise invalid(_PURPOSE, f"{_PURPOSE}: this field is required", MISSING_FIELD)
        if purpose != FOR_BATCH:
            raise invalid_value(_PURPOSE, purpose, f"files here are for {FOR_BATCH!r}")
        lifetime_s = self._lifetime_s()
        name = self._filename[:_MOST_NAME_CHARS]
        return await self._writer.finish(name, purpose, lifetime_s)

    def _lifetime_s(self) -> float:
        """How long the file is kept, at most as long as any is.

        Raises:
            ApiError: 400.
        """
        anchor, seconds = self._field(_ANCHOR), self._field(_SECONDS)
        if anchor not in (None, "created_at"):
            raise invalid_value(_ANCHOR, anchor, "must be created_at")
        if seconds is None:
            if anchor is not None:
                raise invalid(_SECONDS, f"{_SECONDS}: this field is required", MISSING_FIELD)
            return self._store.retention_s
        if not (seconds.isascii() and seconds.isdigit()):
            raise invalid_value(_SECONDS, seconds, "must be a number of seconds")
        if not _SHORTEST_S <= int(seconds) <= _LONGEST_S:
            raise invalid_value(_SECONDS, seconds, f"must be {_SHORTEST_S} to {_LONGEST_S}")
        return min(int(seconds), self._store.retention_s)

    def _field(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode(errors="replace")

    async def _discard(self) -> None:
        if self._writer is not None:
            with suppress(BusError):
                await self._writer.discard()
