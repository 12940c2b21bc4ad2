"""Health checks for containers: ``python -m deploy.health SERVICE``.

It exits with 0, or prints the reason and exits with 1. Scheduler and worker are healthy while their
loops renew their leases in Redis; the gateway while it would serve a request. A separate thread
could answer although the loop hangs, so there is none.
"""

import asyncio
import os
import sys

from deploy.service_probe import health_address, is_ready
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from shared.bus.keys import EngineKeys
from shared.errors import PageStreamError
from shared.settings import load


async def lease_exists(redis_url: str, key: str) -> bool:
    """Whether a lease has not expired."""
    from shared.bus.redis_bus import RedisBus

    bus = RedisBus(redis_url)
    try:
        return await bus.get(key) is not None
    finally:
        await bus.close()


def trouble_of(service: str) -> str | None:
    """Why a service of this machine is unhealthy; None if it is healthy."""
    settings = load(GatewaySettings, {}, os.environ)  # all services have the same Redis and engine
    if service == "gateway":
        ready = is_ready(*health_address(settings))
        return None if ready else "the gateway is not ready"
    keys = EngineKeys(settings.engine_id)
    rank = load(WorkerSettings, {}, os.environ).rank
    key = {"scheduler": keys.info, "worker": keys.worker(rank)}[service]
    try:
        found = asyncio.run(lease_exists(settings.redis_url, key))
    except PageStreamError as error:
        return str(error)
    return None if found else f"{key} is not in Redis: the {service} makes no progress"


if __name__ == "__main__":
    sys.exit(trouble_of(sys.argv[1]))
