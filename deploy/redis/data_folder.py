"""Finds out which server wrote a Redis data folder, and which servers can read it.

The append-only file begins with a snapshot, whose first field names the server that wrote it. A
snapshot's format changes between versions, and a server refuses formats that it does not support.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_MANIFEST = Path("appendonlydir", "appendonly.aof.manifest")
_BASE = re.compile(r"^file (\S+) seq \d+ type b", re.MULTILINE)
_HEADER = re.compile(rb"(?:REDIS|VALKEY)\d+\xfa.(redis|valkey)-ver.(\d+)\.(\d+)", re.DOTALL)
_HEADER_BYTES = 64
# Valkey began as Redis 7.2 and used its format until 9.0, which introduced one of its own; so did
# Redis 7.4.
_COMMON = (7, 2)
_FIRST_OWN = {"redis": (7, 4), "valkey": (9, 0)}


@dataclass(frozen=True, slots=True)
class Version:
    """Kind (``redis``, ``valkey``) and version (major, minor) of a server."""

    kind: str
    number: tuple[int, int]


def name_of(version: Version) -> str:
    """Kind and version for messages: ``Valkey 9.1``."""
    return f"{version.kind.capitalize()} {version.number[0]}.{version.number[1]}"


def version_of_data(folder: Path) -> Version | None:
    """The server that wrote the snapshot in a data folder; None if there is no snapshot."""
    try:
        base = _BASE.search((folder / _MANIFEST).read_text())
        if base is None:
            return None
        with (folder / _MANIFEST.parent / base[1]).open("rb") as file:
            header = _HEADER.match(file.read(_HEADER_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    if header is None:
        return None
    return Version(header[1].decode(), (int(header[2]), int(header[3])))


def can_read(server: Version, writer: Version) -> bool:
    """Whether a server supports the format in which ``writer`` writes snapshots."""
    if server.kind == writer.kind:
        return server.number >= writer.number
    if writer.number >= _FIRST_OWN[writer.kind]:
        return False
    return writer.number < _COMMON or server.number >= _COMMON
