"""Shares threads fairly between callers."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class FairThreads:
    """Runs jobs on threads, serving callers in turn.

    Each caller has a queue, and the queues are served round robin. So a job waits for at most one
    job of each other caller per thread, however many those have sent.

    Args:
        num_threads: jobs that run at once.
        max_per_caller: jobs of one caller that run at once. Less than ``num_threads`` keeps a
            thread free for others.
        name: of the threads.
    """

    def __init__(self, num_threads: int, max_per_caller: int, name: str) -> None:
        assert 1 <= max_per_caller <= num_threads, (max_per_caller, num_threads)
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        self._max_per_caller = max_per_caller
        self._queues: dict[str, deque[_Job]] = {}  # in the order in which they are served
        self._num_running: Counter[str] = Counter()  # by caller

    async def run(self, caller: str, work: Callable[[], _T]) -> _T:
        """Run ``work`` in the caller's turn, and return its result.

        If the awaiting task is cancelled before that, the work does not start.
        """
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._queues.setdefault(caller, deque()).append(job)
        self._begin_jobs()
        result: _T = await job.done
        return result

    def close(self) -> None:
        """Stop the threads; ``run`` may not be called afterwards."""
        for queue in self._queues.values():
            for job in queue:
                job.done.cancel()
        self._queues.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_jobs(self) -> None:
        while self._num_free and (caller := self._next_caller()) is not None:
            queue = self._queues.pop(caller)
            job = queue.popleft()
            if queue:
                self._queues[caller] = queue  # behind all others
            if not job.done.done():
                self._begin(caller, job)

    def _next_caller(self) -> str | None:
        running, limit = self._num_running, self._max_per_caller
        return next((caller for caller in self._queues if running[caller] < limit), None)

    def _begin(self, caller: str, job: _Job) -> None:
        self._num_free -= 1
        self._num_running[caller] += 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)

        def ended(found: "asyncio.Future[Any]") -> None:
            self._num_free += 1
            self._num_running[caller] -= 1
            if not self._num_running[caller]:
                del self._num_running[caller]
            _copy_result(found, job.done)
            self._begin_jobs()

        running.add_done_callback(ended)


def _copy_result(found: "asyncio.Future[Any]", to: "asyncio.Future[Any]") -> None:
    """Copy a job's result to the future that its caller awaits, unless that was cancelled."""
    if found.cancelled():
        to.cancel()
        return
    error = found.exception()
    if to.done():
        return
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(found.result())
