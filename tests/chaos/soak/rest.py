"""Waits until a cluster is idle, and samples the resources of its processes and of Redis."""

import asyncio
import re
import time

from benchmarks.serving.processes import held_by, kept_in_redis
from tests.chaos.cluster import SERVICES, Cluster
from tests.chaos.http_stream import Broken, ask
from tests.chaos.soak.verdict import Sample

_IDLE_LIMIT_S = 90.0  # a killed service must come back, and leases must expire
_LOOK_AGAIN_S = 0.25
_ENGINE = "engine-0"


async def rest(cluster: Cluster, began_s: float) -> Sample:
    """Wait until nothing runs, and take a sample.

    Args:
        began_s: start of the run, on the monotonic clock.
    """
    since_s = time.monotonic()
    left = "nothing was seen"
    idle_after_s = None
    while time.monotonic() - since_s < _IDLE_LIMIT_S:
        left = await _what_runs(cluster)
        if not left:
            idle_after_s = time.monotonic() - since_s
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    pids = {name: cluster.pid(name) for name in SERVICES}
    processes = {name: held_by(pid) for name, pid in pids.items() if pid is not None}
    redis = await asyncio.to_thread(kept_in_redis, cluster.redis, _ENGINE)
    at_min = (time.monotonic() - began_s) / 60
    return Sample(at_min, processes, redis, idle_after_s, left)


async def _what_runs(cluster: Cluster) -> str:
    """What is not idle, "" if all is."""
    try:
        async with asyncio.timeout(10):
            await cluster.all_ready()
        scheduler = await _metrics(cluster, cluster.metrics_port)
        gateways = [await _metrics(cluster, port) for port in cluster.ports]
    except (Broken, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    found = {
        "running": scheduler.get("num_requests_running", 1.0),
        "waiting": scheduler.get("num_requests_waiting", 1.0),
        "share of blocks used": scheduler.get("kv_cache_usage_perc", 1.0),
        "open streams": sum(metrics.get("open_streams", 1.0) for metrics in gateways),
    }
    return ", ".join(f"{what} {number:g}" for what, number in found.items() if number)


async def _metrics(cluster: Cluster, port: int) -> dict[str, float]:
    async with asyncio.timeout(5), ask(port, "/metrics", headers=cluster.headers) as response:
        text = (await response.body()).decode()
    found = re.findall(r"^pagestream:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
