"""Log files of services, of limited size, each with a few older ones.

A file that has grown too large is renamed, and an empty one takes its place. The service that
writes it notices at its next line and reopens it (``shared/logs.py``): nothing is copied, and no
line is lost.
"""

import contextlib
import os
from pathlib import Path

_GENERATIONS = 3


def open_log(log: Path) -> int:
    """Descriptor to append to a log that only its user can read."""
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def rotate_if_large(log: Path, max_bytes: int) -> None:
    """Begin a new file if this one has grown beyond ``max_bytes``, and if the disk has room."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > max_bytes:
            new = log.with_name(f"{log.name}.new")
            os.close(open_log(new))
            rotate(log)
            new.replace(log)


def rotate(log: Path) -> None:
    """Rename ``x.log`` to ``x.log.1``, that one to ``x.log.2``, and so on; delete the oldest."""
    for number in reversed(range(_GENERATIONS)):
        older = log.with_name(f"{log.name}.{number + 1}")
        newer = log.with_name(f"{log.name}.{number}") if number else log
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)
