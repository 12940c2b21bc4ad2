"""An environment for each client: a virtual environment or ``node_modules``, in the user's cache.

It is made at its first use, and again when the file that pins its packages changes.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.cache_folder import cache_folder
from tests.clients.client import PROGRAMS, Client

_INSTALL_DEADLINE_S = 1200.0
_STAMP = ".installed"


class Unavailable(Exception):
    """A client cannot be run here; the text has the reason."""


def prepared(client: Client, root: Path | None = None) -> list[str]:
    """Make a client's environment if there is none, and return the command of its program.

    Args:
        root: folder of all environments; None: in the user's cache.

    Returns:
        the interpreter with the runner; the options follow it.

    Raises:
        Unavailable: Node.js is missing, or the packages cannot be installed.
    """
    folder = (root or cache_folder() / "clients") / client.name
    if client.is_node:
        return _node(client, folder)
    python = folder / "bin" / "python"
    if not _is_current(client, folder):
        shutil.rmtree(folder, ignore_errors=True)
        _run(client, [sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        _run(client, [*pip, "-q", "-r", str(client.requirements)])
        _stamp(client, folder)
    # Programs have names that their packages may have: their folder stays off the path.
    return [str(python), "-P", str(PROGRAMS / "run.py")]


def program_of(client: Client, root: Path | None = None) -> Path:
    """The file with a client's calls, where its interpreter finds the packages."""
    if not client.is_node:
        return PROGRAMS / client.program
    return (root or cache_folder() / "clients") / client.name / client.program


def _node(client: Client, folder: Path) -> list[str]:
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            raise Unavailable(f"{command} is not on PATH; Debian, Ubuntu: apt install nodejs npm")
    if not _is_current(client, folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(client.requirements, folder)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix"]
        _run(client, [*npm, str(folder)])
        _stamp(client, folder)
    # Node.js looks for packages beside the file that imports them.
    shutil.copy(PROGRAMS / client.program, folder)
    return ["node", str(PROGRAMS / "run.mjs")]


def _is_current(client: Client, folder: Path) -> bool:
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == _checksum(client)


def _stamp(client: Client, folder: Path) -> None:
    (folder / _STAMP).write_text(_checksum(client))


def _checksum(client: Client) -> str:
    version = "" if client.is_node else sys.version
    return hashlib.sha256(client.requirements.read_bytes() + version.encode()).hexdigest()


def _run(client: Client, command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_INSTALL_DEADLINE_S, check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        errors = [line for line in lines if "ERR" in line.upper()]
        reason = (errors or lines)[-1]
        raise Unavailable(f"the packages of {client.name} could not be installed: {reason}")
