"""Real processes of one engine with two gateways; every process that dies is restarted at once.

All but Redis run under a spawner, as ``scripts/serve`` and the containers run them.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.processes.child import Child
from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_redis_server
from deploy.redis.server_probe import redis_is_ready
from deploy.settings import REPOSITORY
from deploy.worker_ranks import worker_name
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from tests.chaos.http_stream import Broken, ask

_TICK_S = 0.02
_AGAIN_S = 0.3  # after a death that no test caused
_READY_DEADLINE_S = 180.0  # the first start compiles the kernels
_LOOK_S = 2.0  # for one request
GATEWAYS = ("gateway-1", "gateway-2")
SERVICES = ("redis", "scheduler", "worker", *GATEWAYS)  # of an engine with one worker


class NotReady(Exception):
    """A service did not become ready."""


@dataclass(slots=True)
class _Service:
    command: list[str]
    environ: dict[str, str]
    ready_line: str  # in its log; empty if it has a health check
    child: Child | None = None
    start_at_s: float = 0.0
    was_killed: bool = False
    log_start: int = 0  # position in the log at the last kill

    @property
    def is_spawned(self) -> bool:
        """Whether the child is a spawner, whose own child is the service."""
        return bool(self.ready_line)

    def pid(self) -> int | None:
        """Process id of the service, below its spawner."""
        if self.child is None:
            return None
        return _only_child(self.child.pid) if self.is_spawned else self.child.pid


class Cluster:
    """Redis, scheduler, workers and gateways.

    Args:
        folder: for logs and Redis' data.
        model: folder of the model.
        settings: environment of all services, besides what is set here.
        redis_options: further words of Redis' command line.
        headers: of requests to gateways, for example with an API key.
        num_ranks: workers, which have a part of the model each.

    Attributes:
        ports: of the gateways.
        workers: names of the workers, by rank.
        redis: its address, on a port of loopback.
        deaths: of processes that no test killed, with the last lines of their logs.
        starts_s: by service, seconds until ready after each kill; for spawners under the name with
            ``+ spawner``.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        settings: Mapping[str, str],
        redis_options: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.folder = folder
        self.headers = dict(headers or {})
        self.deaths: list[str] = []
        self.starts_s: dict[str, list[float]] = {}
        self.ports = [free_port() for _ in GATEWAYS]
        self.redis = Endpoint(None, free_port())
        self.metrics_port = free_port()
        (folder / "redis").mkdir(parents=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PAGESTREAM_")}
        environ |= {
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "REDIS_URL": self.redis.url,
            KERNEL_CACHE: str(kernel_cache()),
            "PAGESTREAM_MODEL": str(model),
            "PAGESTREAM_SERVED_MODEL_NAME": "chaos",
            "PAGESTREAM_DEVICE": "cpu",
            "PAGESTREAM_DTYPE": "float32",
            "PAGESTREAM_NUM_THREADS": "1",
            "PAGESTREAM_QUANTIZATION": os.environ.get("WEIGHTS", ""),
            "PAGESTREAM_WORKER_METRICS_PORT": "0",
            "PAGESTREAM_SCHEDULER_METRICS_PORT": str(self.metrics_port),
            **settings,
        }
        redis = configure(find_redis_server(), self.redis, folder / "redis")
        redis += redis_options
        python = [sys.executable, "-m", "deploy.processes.spawner"]
        self.workers = tuple(worker_name(rank) for rank in range(num_ranks))
        self._services = {
            "redis": _Service(redis, environ, ""),
            "scheduler": _Service([*python, "scheduler_svc"], environ, "epoch started"),
        }
        for rank, name in enumerate(self.workers):
            mine = environ | {
                "PAGESTREAM_RANK": str(rank),
                "PAGESTREAM_TENSOR_PARALLEL_SIZE": str(num_ranks),
            }
            self._services[name] = _Service([*python, "gpu_worker"], mine, "worker ready")
        for name, port in zip(GATEWAYS, self.ports, strict=True):
            mine = environ | {"PAGESTREAM_PORT": str(port)}
            self._services[name] = _Service([*python, "gateway"], mine, "listening url=")
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Cluster":
        self._keep()
        self._keeper = asyncio.create_task(self._keep_running())
        try:
            async with asyncio.timeout(_READY_DEADLINE_S):
                await self.all_ready()
        except TimeoutError:
            await self.close()
            raise NotReady(f"not ready after {_READY_DEADLINE_S:g} s; see {self.folder}") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every process."""
        if self._keeper is not None:
            self._keeper.cancel()
        for service in self._services.values():
            if service.child is not None:
                service.child.kill()
        while any(s.child is not None and s.child.poll() is None for s in self._services.values()):
            await asyncio.sleep(_TICK_S)

    async def all_ready(self) -> None:
        """Wait until every gateway would serve a request."""
        for port in self.ports:
            while not await self._gateway_is_ready(port, "/health/ready"):
                await asyncio.sleep(0.1)

    def names(self, target: str) -> Sequence[str]:
        """The services that a target stands for: one of them is disrupted."""
        return {"gateway": GATEWAYS, "worker": self.workers}.get(target, (target,))

    def log(self, name: str) -> Path:
        """The log of a service, with all its processes in one file."""
        return self.folder / f"{name}.log"

    def pid_file(self, name: str) -> Path:
        """The file with the id of a service's spawner, or of its process if it has none."""
        return self.folder / f"{name}.pid"

    def pid(self, name: str) -> int | None:
        """Process id of a service, not of its spawner."""
        return self._services[name].pid()

    def has_spawner(self, name: str) -> bool:
        """Whether a service runs under a spawner."""
        return self._services[name].is_spawned

    def kill(self, name: str, with_spawner: bool = False) -> None:
        """Kill a process without any chance to clean up.

        Args:
            with_spawner: kill the spawner, with which the service dies.
        """
        service = self._services[name]
        if service.child is None:
            return
        service.log_start = self.log(name).stat().st_size
        pid = service.pid()
        if with_spawner or not service.is_spawned:
            service.was_killed = True
            service.child.kill()
        elif pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pause(self, name: str) -> int | None:
        """Stop a service's process by SIGSTOP; its id."""
        pid = self._services[name].pid()
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        return pid

    def go_on(self, pid: int) -> None:
        """Continue a paused process, if it has not been killed meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def back(self, name: str, with_spawner: bool = False) -> None:
        """Wait until a killed service is ready again."""
        began = time.monotonic()
        while not await self._is_back(name):
            await asyncio.sleep(0.05)
        key = f"{name} + spawner" if with_spawner else name
        self.starts_s.setdefault(key, []).append(time.monotonic() - began)

    async def _is_back(self, name: str) -> bool:
        service = self._services[name]
        if service.child is None or service.was_killed:
            return False
        if name == "redis":
            return await asyncio.to_thread(redis_is_ready, self.redis)
        with self.log(name).open() as log:
            log.seek(service.log_start)
            return service.ready_line in log.read()

    async def _gateway_is_ready(self, port: int, path: str) -> bool:
        try:
            async with asyncio.timeout(_LOOK_S), ask(port, path, headers=self.headers) as response:
                return response.status == 200
        except (Broken, TimeoutError):
            return False

    async def _keep_running(self) -> None:
        while True:
            self._keep()
            await asyncio.sleep(_TICK_S)

    def _keep(self) -> None:
        now_s = time.monotonic()
        for name, service in self._services.items():
            child = service.child
            if child is not None and (code := child.poll()) is not None:
                if not service.was_killed:
                    tail = " | ".join(child.log_tail(3))
                    self.deaths.append(f"{name} ended with {code}: {tail}")
                    service.start_at_s = now_s + _AGAIN_S
                service.child, service.was_killed = None, False
            if service.child is None and now_s >= service.start_at_s:
                pid_file, log = self.pid_file(name), self.log(name)
                service.child = Child(service.command, service.environ, log, pid_file)


def _only_child(pid: int) -> int | None:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return None
    return int(found[0]) if found else None
