"""Reads the lines of a file that is kept in pieces."""

from codecs import BOM_UTF8
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gateway.batches.records import Progress
from gateway.files.store import FileStore
from shared.bus.api import EntryId

_EPOCH = 1  # of the pieces of a file that was uploaded


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file.

    Attributes:
        number: from 0.
        piece, offset: where it begins.
        data: without its end; None: it is too long.
    """

    number: int
    piece: int
    offset: int
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        """There is nothing in it."""
        return self.data is not None and not self.data.strip()


async def read_lines(
    files: FileStore, file_id: str, start: Progress, max_bytes: int
) -> AsyncGenerator[Line, None]:
    """The lines of a file from one of them on.

    No more than a line and a few pieces are held.

    Args:
        max_bytes: of a line.
    """
    number, begin = start.line, (start.piece, start.offset)
    parts: list[bytes] = []
    size, skipped = 0, start.offset
    async for place, data in files.pieces(file_id, EntryId(_EPOCH, start.piece - 1)):
        at, skipped = skipped, 0
        while (end := data.find(b"\n", at)) >= 0:
            size += end - at
            parts.append(data[at:end])
            yield Line(number, *begin, _joined(parts, number) if size <= max_bytes else None)
            number, begin, at = number + 1, (place.seq, end + 1), end + 1
            parts, size = [], 0
        size += len(data) - at
        if size > max_bytes:
            parts.clear()
        else:
            parts.append(data[at:])
    if size:
        yield Line(number, *begin, _joined(parts, number) if size <= max_bytes else None)


def _joined(parts: list[bytes], number: int) -> bytes:
    data = b"".join(parts)
    return data.removeprefix(BOM_UTF8) if number == 0 else data
