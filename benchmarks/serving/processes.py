"""Resources of running processes: memory, descriptors, and data in Redis. Linux only."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from deploy.redis.server import Endpoint
from shared.bus.keys import EngineKeys

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that one process uses now."""

    pid: int
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Data that Redis keeps for one engine."""

    used_bytes: int  # by all data
    requests: int  # entries of each log
    plans: int
    outputs: int
    num_keys: int
    log_bytes: int = 0  # of all three logs


def held_by(pid: int) -> Held:
    """The resources of a process.

    Raises:
        OSError: it has ended.
    """
    folder = Path("/proc") / str(pid)
    rss_pages = int((folder / "statm").read_text().split()[1])
    num_threads = len(list((folder / "task").iterdir()))
    num_fds = len(list((folder / "fd").iterdir()))
    return Held(pid, rss_pages * _PAGE_BYTES, num_fds, num_threads)


def service_pid(pid: int) -> int:
    """Process id of a service's own process, below its spawner.

    Raises:
        OSError: it has ended.
    """
    folder = Path("/proc") / str(pid)
    if b"deploy.processes.spawner" not in (folder / "cmdline").read_bytes():
        return pid
    children = (folder / "task" / str(pid) / "children").read_text().split()
    return int(children[0]) if children else pid


def kept_in_redis(redis: Endpoint, engine_id: str) -> Kept:
    """The data that a Redis on loopback keeps.

    Raises:
        OSError: it does not answer.
    """
    keys = EngineKeys(engine_id)
    logs = (keys.requests, keys.plans, keys.outputs)
    requests, plans, outputs = (int(redis_reply(redis, f"XLEN {log}")) for log in logs)
    sizes = (redis_reply(redis, f"MEMORY USAGE {log} SAMPLES 0") for log in logs)
    return Kept(
        used_bytes=redis_used_bytes(redis),
        requests=requests,
        plans=plans,
        outputs=outputs,
        num_keys=int(redis_reply(redis, "DBSIZE")),
        log_bytes=sum(int(size) for size in sizes if size),
    )


def redis_used_bytes(redis: Endpoint) -> int:
    """Memory that a Redis on loopback has allocated.

    Raises:
        OSError: it does not answer.
    """
    found = re.search(r"used_memory:(\d+)", redis_reply(redis, "INFO memory"))
    if found is None:
        raise OSError("Redis does not report its memory")
    return int(found[1])


def redis_reply(redis: Endpoint, command: str) -> str:
    """The reply of a Redis on loopback to one command: a number or a text, "" for nil.

    Raises:
        OSError: it does not answer, or with an error.
    """
    with redis.connect(_TIMEOUT_S) as connection:
        connection.sendall(f"{command}\r\n".encode())
        with connection.makefile("rb") as answer:
            head = answer.readline().decode().strip()
            if head.startswith("$"):
                return answer.read(max(0, int(head[1:]))).decode()
    if not head.startswith(":"):
        raise OSError(f"Redis answers {command} with {head[:80]!r}")
    return head[1:]
