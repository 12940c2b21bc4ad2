"""Keeps files in Redis: a log of pieces for each, the bytes of each API key counted."""

import re
import secrets
import time
from collections.abc import AsyncIterator

from gateway.files.records import FileInfo, FilePiece
from gateway.http.errors import ApiError, file_too_large, files_full
from gateway.http.pages import PageQuery
from gateway.jobs.kept_bytes import KeptBytes
from gateway.jobs.kept_names import KeptNames
from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode_as, encode

LONGEST_WINDOW_S = 7 * 86_400  # in which a batch is to be completed
PIECE_BYTES = 128 * 2**10
NEXT_TO_NOTHING_BYTES = 512  # of a file or a batch, beside its pieces
_ID = re.compile(r"file-[0-9a-f]{32}")
_EPOCH = 1  # of the pieces of a file that is uploaded
_PIECES_AT_ONCE = 4
_INFOS_AT_ONCE = 200


def unknown_file(file_id: str, param: str | None = None) -> ApiError:
    """404: there is none of this id, or it is another key's, or it is not kept any more."""
    return ApiError(
        404,
        f"{param or 'id'}: no such File object: {file_id[:80]!r}: there was none, or it was "
        "deleted, or the time for which files are kept is over",
        param=param,
        code="file_not_found",
        rejection="invalid",
    )


def new_file_id() -> str:
    """The id of a new file."""
    return f"file-{secrets.token_hex(16)}"


class FileStore:
    """The files of one engine.

    Every method raises BusUnavailable.

    Args:
        retention_s: so long a file is kept.
        max_bytes: of the files of one API key.
        max_file_bytes: of a file that is uploaded.
    """

    def __init__(
        self, bus: Bus, keys: EngineKeys, retention_s: float, max_bytes: int, max_file_bytes: int
    ) -> None:
        self.bus = bus
        self.keys = keys
        self.retention_s = retention_s
        self.max_file_bytes = max_file_bytes
        longest_s = retention_s + LONGEST_WINDOW_S
        self.kept = KeptBytes(bus, keys.file_bytes, retention_s, max_bytes, longest_s)
        self._names = KeptNames(bus, keys.file_names, longest_s, "files")

    async def find(self, file_id: str, tenant: str, param: str | None = None) -> FileInfo:
        """A file of an API key.

        Args:
            param: field of the body that names it.

        Raises:
            ApiError: 404.
        """
        if _ID.fullmatch(file_id) is None:
            raise unknown_file(file_id, param)
        data = await self.bus.get(self.keys.file(file_id))
        info: FileInfo | None = None if data is None else decode_as(FileInfo, data)
        if info is None or info.tenant != tenant:
            raise unknown_file(file_id, param)
        return info

    async def page(
        self, tenant: str, query: PageQuery, purpose: str | None
    ) -> tuple[list[FileInfo], bool]:
        """Files of an API key, and whether there are more behind them.

        Raises:
            ApiError: 400, no file has the id that should precede them.
        """
        ids = query.behind(await self._names.all(tenant))
        found: list[FileInfo] = []
        for start in range(0, len(ids), _INFOS_AT_ONCE):
            names = [self.keys.file(name) for name in ids[start : start + _INFOS_AT_ONCE]]
            for data in await self.bus.get_all(names):
                info: FileInfo | None = None if data is None else decode_as(FileInfo, data)
                if info is None or purpose not in (None, info.purpose):
                    continue
                if len(found) == query.limit:
                    return found, True
                found.append(info)
        return found, False

    async def pieces(
        self, file_id: str, after: EntryId = START
    ) -> AsyncIterator[tuple[EntryId, bytes]]:
        """The pieces behind one of them, or all, each with its place."""
        log = self.keys.file_pieces(file_id)
        while True:
            entries = (await self.bus.read({log: after}, 0, _PIECES_AT_ONCE)).get(log, [])
            for entry in entries:
                piece: FilePiece = decode_as(FilePiece, entry.messages[0])
                yield entry.id, piece.data
                after = entry.id
            if not entries:
                return

    async def check_room(self, tenant: str, num_bytes: int) -> None:
        """Refuse a file for which there is no room.

        Raises:
            ApiError: 413 or 429.
        """
        if num_bytes > self.max_file_bytes:
            raise file_too_large(self.max_file_bytes)
        if not await self.kept.has_room(tenant, num_bytes + NEXT_TO_NOTHING_BYTES):
            raise files_full(self.kept.limit)
        await self._names.check_room(tenant)

    async def publish(self, info: FileInfo) -> None:
        """Let clients find a file whose pieces are complete; it may be published again."""
        ttl_ms = max(1, int(1000 * (info.expires_s - time.time())))
        await self.bus.put(self.keys.file(info.id), encode(info), ttl_ms)
        await self.bus.expire(self.keys.file_pieces(info.id), ttl_ms)
        await self._names.add(info.tenant, info.id)

    async def keep_until(self, info: FileInfo, until_s: float) -> None:
        """Keep the pieces of a file until then, even if clients cannot find it any more."""
        ttl_s = max(info.expires_s, until_s) - time.time()
        await self.bus.expire(self.keys.file_pieces(info.id), int(1000 * ttl_s))

    async def delete(self, info: FileInfo) -> None:
        """Forget a file."""
        if await self.bus.delete(self.keys.file(info.id)):  # else another call deletes it
            await self.bus.delete(self.keys.file_pieces(info.id))
            num_bytes = info.num_bytes + NEXT_TO_NOTHING_BYTES
            await self.kept.add(info.tenant, info.counted_until_s, -num_bytes)


class FileWriter:
    """Writes a new file. It cannot be found before it is complete.

    Every method raises BusUnavailable.
    """

    def __init__(self, store: FileStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._id = new_file_id()
        self._created_s = int(time.time())
        self._longest_s = self._created_s + int(store.retention_s)
        self._buffer = bytearray()
        self._num_bytes = 0  # written
        self._num_counted = 0  # for the API key
        self._num_pieces = 0

    async def add(self, data: bytes) -> None:
        """Write what follows.

        Raises:
            ApiError: 413 or 429, it is too much.
        """
        self._buffer += data
        if self._num_bytes + len(self._buffer) > self._store.max_file_bytes:
            raise file_too_large(self._store.max_file_bytes)
        while len(self._buffer) >= PIECE_BYTES:
            await self._write(bytes(self._buffer[:PIECE_BYTES]))
            del self._buffer[:PIECE_BYTES]

    async def finish(self, filename: str, purpose: str, lifetime_s: float) -> FileInfo:
        """Write the rest, and let clients find the file.

        Args:
            lifetime_s: so long it is kept.

        Raises:
            ApiError: 429.
        """
        if self._buffer:
            await self._write(bytes(self._buffer))
        await self._count(NEXT_TO_NOTHING_BYTES)
        info = FileInfo(
            id=self._id,
            tenant=self._tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=self._num_bytes,
            created_s=self._created_s,
            expires_s=self._created_s + int(lifetime_s),
            counted_until_s=self._longest_s,
        )
        await self._store.publish(info)
        return info

    async def discard(self) -> None:
        """Drop what was written."""
        await self._store.bus.delete(self._store.keys.file_pieces(self._id))
        await self._store.kept.add(self._tenant, self._longest_s, -self._num_counted)

    async def _write(self, data: bytes) -> None:
        log = self._store.keys.file_pieces(self._id)
        self._num_pieces += 1
        self._num_bytes += len(data)
        await self._count(len(data))
        piece = [encode(FilePiece(data))]
        await self._store.bus.append(Append(log, piece, _EPOCH, self._num_pieces))
        if self._num_pieces == 1:
            await self._store.bus.expire(log, int(1000 * self._store.retention_s))

    async def _count(self, num_bytes: int) -> None:
        kept = self._store.kept
        self._num_counted += num_bytes
        if await kept.add(self._tenant, self._longest_s, num_bytes) > kept.limit:
            raise files_full(kept.limit)
