"""The threads beside the loop: one computes, so that the loop can talk to the bus meanwhile."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_worker.kv.premap import LookAhead
from gpu_worker.step.executor import Executor

# Kernels run without Python's lock, but what calls them holds it. The loop has little to do in a
# step and must not wait for it as long as Python lets threads wait by default, which is 5 ms.
_SWITCH_S = 0.0005


def compute_thread(device: torch.device) -> ThreadPoolExecutor:
    """One thread, set up like the one that loaded the model."""
    num_threads = torch.get_num_threads()
    sys.setswitchinterval(_SWITCH_S)

    def enter() -> None:
        # Both belong to a thread, not to the process.
        torch.set_num_threads(num_threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, "compute", enter)


def waiting_thread(device: torch.device) -> ThreadPoolExecutor | None:
    """One that waits for a GPU while the next step begins; None: a CPU computes by itself."""
    if device.type != "cuda":
        return None
    return ThreadPoolExecutor(1, "wait", torch.cuda.set_device, (device,))


def look_ahead(executor: Executor) -> LookAhead | None:
    """On a thread of its own; None if memory has nothing to prepare."""
    if executor.memory.mapping is None:
        return None

    def enter() -> None:
        if executor.device.type == "cuda":
            torch.cuda.set_device(executor.device)

    return LookAhead(executor, ThreadPoolExecutor(1, "look-ahead", enter))
