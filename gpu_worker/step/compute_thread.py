"""The threads beside the event loop: for computing, for waiting on a GPU, and for premapping."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_worker.kv.premap import Premapper
from gpu_worker.step.executor import Executor

# Kernels run without the GIL, but the code that calls them holds it. The event loop has little to
# do in a step, and must not wait for Python's default switch interval of 5 ms.
_SWITCH_S = 0.0005


def compute_thread(device: torch.device) -> ThreadPoolExecutor:
    """One thread with the thread count and the GPU of the thread that loaded the model."""
    num_threads = torch.get_num_threads()
    sys.setswitchinterval(_SWITCH_S)

    def enter() -> None:
        # Both belong to a thread, not to the process.
        torch.set_num_threads(num_threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, "compute", enter)


def waiting_thread(device: torch.device) -> ThreadPoolExecutor | None:
    """A thread that waits for a GPU while the next step begins; None on CPUs."""
    if device.type != "cuda":
        return None
    return ThreadPoolExecutor(1, "wait", torch.cuda.set_device, (device,))


def premapper(executor: Executor) -> Premapper | None:
    """A premapper with a thread of its own; None if this memory maps no blocks."""
    if executor.memory.mapping is None:
        return None

    def enter() -> None:
        if executor.device.type == "cuda":
            torch.cuda.set_device(executor.device)

    return Premapper(executor, ThreadPoolExecutor(1, "premap", enter))
