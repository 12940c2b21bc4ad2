"""Threads are shared between callers, not between jobs."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from gateway.prompts.fair_threads import FairThreads


class Gate:
    """Work that waits until it may go on, and the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.open.wait(10)
            return name

        return run


async def begun(gate: Gate, number: int) -> None:
    async with asyncio.timeout(10):
        while len(gate.begun) < number:
            await asyncio.sleep(0.001)


async def test_a_caller_waits_for_one_job_of_another_and_not_for_its_queue() -> None:
    threads, gate = FairThreads(1, 1, "test"), Gate()
    jobs = [asyncio.ensure_future(threads.run("a", gate.work(f"a{n}"))) for n in range(20)]
    await begun(gate, 1)
    jobs.append(asyncio.ensure_future(threads.run("b", gate.work("b"))))
    jobs.append(asyncio.ensure_future(threads.run("c", gate.work("c"))))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*jobs)
    assert gate.begun[:5] == ["a0", "a1", "b", "c", "a2"]
    threads.close()


async def test_one_caller_does_not_take_the_last_thread() -> None:
    threads, gate = FairThreads(3, 2, "test"), Gate()
    jobs = [asyncio.ensure_future(threads.run("a", gate.work("a"))) for _ in range(9)]
    await begun(gate, 2)
    assert await threads.run("b", lambda: "at once") == "at once"
    assert gate.begun == ["a", "a"]
    gate.open.set()
    assert await asyncio.gather(*jobs) == ["a"] * 9
    threads.close()


async def test_work_whose_caller_has_gone_is_not_begun() -> None:
    threads, gate = FairThreads(1, 1, "test"), Gate()
    first = asyncio.ensure_future(threads.run("a", gate.work("first")))
    await begun(gate, 1)
    second = asyncio.ensure_future(threads.run("a", gate.work("second")))
    await asyncio.sleep(0)
    second.cancel()
    gate.open.set()
    await first
    assert await threads.run("a", gate.work("third")) == "third"
    assert gate.begun == ["first", "third"]
    threads.close()


async def test_an_error_reaches_the_task_that_waits_and_frees_the_thread() -> None:
    threads = FairThreads(1, 1, "test")

    def fail() -> None:
        raise ValueError("no such thing")

    for _ in range(3):
        with pytest.raises(ValueError, match="no such thing"):
            await threads.run("a", fail)
    assert await threads.run("a", lambda: 5) == 5
    threads.close()
