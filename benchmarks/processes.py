"""What running processes hold: memory, descriptors, and what is kept in Redis. Linux only."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from shared.bus.keys import EngineKeys

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds now."""

    pid: int
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What Redis keeps of one engine."""

    used_bytes: int  # by all data
    requests: int  # entries of each log
    plans: int
    outputs: int
    num_keys: int


def held_by(pid: int) -> Held:
    """What a process holds.

    Raises:
        OSError: it has ended.
    """
    folder = Path("/proc") / str(pid)
    rss_pages = int((folder / "statm").read_text().split()[1])
    num_threads = len(list((folder / "task").iterdir()))
    num_fds = len(list((folder / "fd").iterdir()))
    return Held(pid, rss_pages * _PAGE_BYTES, num_fds, num_threads)


def service_pid(pid: int) -> int:
    """The process that does the work of a service: a spawner only keeps it running.

    Raises:
        OSError: it has ended.
    """
    folder = Path("/proc") / str(pid)
    if b"deploy.spawner" not in (folder / "cmdline").read_bytes():
        return pid
    children = (folder / "task" / str(pid) / "children").read_text().split()
    return int(children[0]) if children else pid


def kept_in_redis(port: int, engine_id: str) -> Kept:
    """What a Redis on loopback keeps.

    Raises:
        OSError: it does not answer.
    """
    keys = EngineKeys(engine_id)
    found = re.search(r"used_memory:(\d+)", _say(port, "INFO memory"))
    if found is None:
        raise OSError("Redis does not say how much memory it uses")
    return Kept(
        used_bytes=int(found[1]),
        requests=int(_say(port, f"XLEN {keys.requests}")),
        plans=int(_say(port, f"XLEN {keys.plans}")),
        outputs=int(_say(port, f"XLEN {keys.outputs}")),
        num_keys=int(_say(port, "DBSIZE")),
    )


def _say(port: int, command: str) -> str:
    """The answer to one command, which is a number or a text."""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        connection.sendall(f"{command}\r\n".encode())
        with connection.makefile("rb") as answer:
            head = answer.readline().decode().strip()
            if head.startswith("$"):
                return answer.read(int(head[1:])).decode()
    if not head.startswith(":"):
        raise OSError(f"Redis answers {command} with {head[:80]!r}")
    return head[1:]
