"""The workers of an engine on one machine, one for each rank, and what differs between them."""

import os
from collections.abc import Iterator

from deploy.options import Options
from deploy.redis.ports import prefer_port
from shared.errors import SettingsError

WORKER = "worker"
"""Name of the service of rank 0; those of other ranks have a number behind it."""


def worker_name(rank: int) -> str:
    """The name of the service of a rank."""
    return f"{WORKER}-{rank}" if rank else WORKER


def worker_names(options: Options) -> list[str]:
    """The services of all ranks."""
    return [worker_name(rank) for rank in range(options.worker.tensor_parallel_size)]


def check_ranks(options: Options) -> None:
    """Refuse settings of single ranks, all of which this machine runs.

    Raises:
        SettingsError: one is given.
    """
    if "rank" in options.given:
        reason = "scripts/serve starts the workers of all ranks; it is for workers started by hand"
        raise SettingsError("--rank", options.worker.rank, reason)


def rank_environments(options: Options) -> Iterator[tuple[str, dict[str, str]]]:
    """The services of all ranks, each with the variables that are its own.

    Workers get an equal share of the cores unless a number of threads is given, a metrics port each
    behind that of rank 0, and a GPU each.
    """
    worker = options.worker
    num_ranks = worker.tensor_parallel_size
    taken: list[int] = [options.scheduler.scheduler_metrics_port, worker.worker_metrics_port]
    for rank in range(num_ranks):
        environ = {"PAGESTREAM_RANK": str(rank)}
        if num_ranks > 1 and worker.num_threads is None:
            threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
            environ["PAGESTREAM_NUM_THREADS"] = str(threads)
        if rank and worker.worker_metrics_port:
            wanted = worker.worker_metrics_port + rank
            port = prefer_port(worker.worker_metrics_host, wanted, taken)
            taken.append(port)
            environ["PAGESTREAM_WORKER_METRICS_PORT"] = str(port)
        if num_ranks > 1 and worker.device == "cuda":
            environ["PAGESTREAM_DEVICE"] = f"cuda:{rank}"
        yield worker_name(rank), environ
