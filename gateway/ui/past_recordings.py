"""Recordings in a folder, which the page may open by name; only their names and sizes are read."""

import heapq
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.http.errors import ApiError, invalid_value, shown

_MOST_FILES = 200  # in a list; the newest ones
_MOST_NAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """A file of the folder."""

    name: str
    path: str
    num_bytes: int

    def row(self, span: dict[str, Any] | None) -> dict[str, Any]:
        """What a list shows of it.

        Args:
            span: empty if there is nothing to show in it; None: not known.
        """
        known: dict[str, Any] = {"is_damaged": True} if span == {} else span or {}
        return {"name": self.name, "bytes": self.num_bytes, **known}


class Recordings:
    """The files of a folder.

    Args:
        folder: None: there are none.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).resolve()

    def files(self) -> list[RecordingFile]:
        """The newest ones, newest first. Blocks."""
        if self._folder is None or not self._folder.is_dir():
            return []
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if (known := self._find(entry.name)) is not None:
                    path, about = known
                    file = RecordingFile(entry.name, str(path), about.st_size)
                    found.append((about.st_mtime_ns, file))
        newest = heapq.nlargest(_MOST_FILES, found, key=lambda pair: (pair[0], pair[1].name))
        return [file for _, file in newest]

    def path_of(self, name: str) -> str:
        """The path of the file with this name. Blocks.

        Raises:
            ApiError: 400, it is no name of a file; 404, there is no such one, or it is a link to
                elsewhere.
        """
        if not _is_name(name):
            raise invalid_value("recording", name, "expected the name of a file, without a folder")
        if (known := self._find(name)) is None:
            text = f"recording={shown(name)}: there is no such recording"
            raise ApiError(404, text, param="recording", code="unknown_recording")
        return str(known[0])

    def _find(self, name: str) -> tuple[Path, os.stat_result] | None:
        """The file itself, if there is one below this name, and it lies in the folder."""
        if self._folder is None or not _is_name(name):
            return None
        try:
            path = (self._folder / name).resolve(strict=True)
            about = path.stat()
        except (OSError, RuntimeError):  # a loop of links is the latter before Python 3.13
            return None
        is_inside = path.parent == self._folder and stat.S_ISREG(about.st_mode)
        return (path, about) if is_inside else None


def _is_name(name: str) -> bool:
    """Whether a text may name a file of the folder; hidden ones are not shown."""
    is_text = name.isprintable() and 0 < len(name) <= _MOST_NAME_CHARS
    return is_text and not name.startswith(".") and not {"/", "\\"} & set(name)
