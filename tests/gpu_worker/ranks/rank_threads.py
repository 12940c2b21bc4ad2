"""The ranks of a group as threads of one process: each has its own model and connections."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from gpu_worker.ranks.collectives import TorchCollectives
from gpu_worker.ranks.member import Member
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.ranks.shared_memory import share_memory
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from tests.gpu_worker.conftest import poison

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class RankThreads:
    """A thread for each rank; groups are formed among them.

    Args:
        num_ranks: of every group.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._threads = [
            ThreadPoolExecutor(1, f"rank-{rank}", torch.set_num_threads, (1,))
            for rank in range(num_ranks)
        ]
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._names = (f"group {number}" for number in count())

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """The results of ``work(rank)`` of all ranks, which run at the same time."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result(120) for future in futures]

    def connect(
        self, in_rank_order: bool = False, shared: bool = True, device: torch.device = _CPU
    ) -> list[Ranks]:
        """Form a new group, which shares memory or not."""
        name = next(self._names)

        def connected(rank: int) -> Ranks:
            store = TCPStore(_HOST, self._store.port, is_master=False, wait_for_workers=False)
            member = Member(rank, self.num_ranks, name)
            collectives = TorchCollectives(member, store, _HOST, device, in_rank_order)
            shares = shared and device == _CPU
            return Ranks.of(share_memory(collectives) if shares else collectives, device)

        return self.run(connected)

    def build(
        self, model: str, group: list[Ranks] | None = None, **settings: Any
    ) -> tuple[list[Worker], list[Ranks]]:
        """Workers with a part of a model each, their pools poisoned; and their group."""
        ranks = self.connect() if group is None else group
        values = {
            "model": model,
            "dtype": "float32",
            "device": "cpu",
            "num_blocks": 64,
            "num_threads": 1,
            "tensor_parallel_size": self.num_ranks,
            **settings,
        }

        def built(rank: int) -> Worker:
            worker = build_worker(WorkerSettings(**values, rank=rank), ranks=ranks[rank])
            poison(worker.executor)
            return worker

        return self.run(built), ranks

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
