"""Health checks for containers: ``python -m deploy.health CHECK``.

It exits with 0, or prints the reason and exits with 1. Scheduler and worker are healthy while their
loops renew their leases in Redis; the gateway while it would serve a request. A separate thread
could answer although the loop hangs, so there is none. Besides these services, there are the checks
``worker-ready``, that a model is loaded, and ``engine-ready``, that an engine takes requests.
"""

import asyncio
import os
import sys

from deploy.service_probe import health_address, is_ready
from gateway.settings import GatewaySettings
from shared.bus.keys import EngineKeys
from shared.errors import PageStreamError
from shared.messages.leases import EngineInfo, EngineState, WorkerInfo, WorkerState, decode_lease
from shared.settings import load

_READY = ("worker-ready", "engine-ready")


async def lease(redis_url: str, key: str) -> bytes | None:
    """A lease that has not expired."""
    from shared.bus.redis_bus import RedisBus

    bus = RedisBus(redis_url)
    try:
        return await bus.get(key)
    finally:
        await bus.close()


def trouble_of(check: str) -> str | None:
    """Why a check of this machine's services fails; None if it passes."""
    settings = load(GatewaySettings, {}, os.environ)  # all services have the same Redis and engine
    if check == "gateway":
        ready = is_ready(*health_address(settings))
        return None if ready else "the gateway is not ready"
    keys = EngineKeys(settings.engine_id)
    is_worker = check.startswith("worker")
    service, key = ("worker", keys.worker(_rank())) if is_worker else ("scheduler", keys.info)
    return _trouble_of_lease(settings.redis_url, service, key, check in _READY)


def is_engine_ready(redis_url: str, engine_id: str) -> bool:
    """Whether an engine takes requests, by its lease."""
    return _trouble_of_lease(redis_url, "scheduler", EngineKeys(engine_id).info, True) is None


def _trouble_of_lease(redis_url: str, service: str, key: str, must_be_ready: bool) -> str | None:
    try:
        found = asyncio.run(lease(redis_url, key))
        if found is None:
            return f"{key} is not in Redis: the {service} makes no progress"
        return _why_not_ready(service, found) if must_be_ready else None
    except PageStreamError as error:
        return str(error)


def _rank() -> int:
    """The rank of this machine's worker."""
    from gpu_worker.settings import WorkerSettings  # other services' images have no such package

    return load(WorkerSettings, {}, os.environ).rank


def _why_not_ready(service: str, data: bytes) -> str | None:
    if service == "worker":
        worker = decode_lease(WorkerInfo, data, service)
        is_ready = worker.state == WorkerState.READY
        return None if is_ready else f"the worker is {worker.state} {worker.detail}"
    engine = decode_lease(EngineInfo, data, service)
    if engine.draining:
        return "the engine drains"
    return None if engine.state == EngineState.READY else f"the engine is {engine.state}"


if __name__ == "__main__":
    sys.exit(trouble_of(sys.argv[1]))
