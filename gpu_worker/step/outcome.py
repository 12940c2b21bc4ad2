"""The sampled tokens of a step, copied to the host, and the device's times for it."""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.sampler import ChosenTokens


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a step.

    Attributes:
        model_s: seconds of the forward pass.
        sample_s: seconds of sampling.
        ended_s: when the tokens were on the host, by ``time.perf_counter``.
    """

    model_s: float
    sample_s: float
    ended_s: float


class Outcome(Protocol):
    """Collects tokens and times of one step; its methods are called in this order."""

    def model_begins(self) -> None:
        """Mark the time before the forward pass is queued."""

    def model_ended(self) -> None:
        """Mark the time after the forward pass was queued."""

    def sampled(self, chosen: ChosenTokens | None) -> None:
        """Queue the copy of the tokens of the R rows that sample; None: no row samples."""

    def wait(self) -> None:
        """Wait until all of it is done; callable from any thread."""

    def tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens [R], and the rows whose logits were not finite; after ``wait``."""

    def times(self) -> Times:
        """The times of the step; after ``wait``."""


class HostOutcome:
    """The outcome of a step on the CPU, where every call returns when its work is done."""

    def __init__(self) -> None:
        self._marks: list[float] = []
        self._tokens = self._broken = np.empty(0, np.int64)

    def model_begins(self) -> None:
        self._marks.append(time.perf_counter())

    def model_ended(self) -> None:
        self._marks.append(time.perf_counter())

    def sampled(self, chosen: ChosenTokens | None) -> None:
        if chosen is not None:
            self._tokens = chosen.tokens.numpy()
            self._broken = chosen.broken.numpy().nonzero()[0]
        self._marks.append(time.perf_counter())

    def wait(self) -> None:
        pass

    def tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._tokens, self._broken

    def times(self) -> Times:
        began, computed, ended = self._marks
        return Times(computed - began, ended - computed, ended)


class CudaOutcome:
    """The outcome of a step on a GPU: copied to pinned memory, timed by CUDA events.

    Args:
        memory: pinned [2, n] int64, tokens and flags; used by this step alone until ``tokens``
            has been called.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._num_rows = 0
        self._marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        ]
        self._ended_s: float | None = None

    def model_begins(self) -> None:
        self._ended_s = None
        self._marks[0].record()

    def model_ended(self) -> None:
        self._marks[1].record()

    def sampled(self, chosen: ChosenTokens | None) -> None:
        self._num_rows = 0
        if chosen is not None:
            self._num_rows = num_rows = len(chosen.tokens)
            if num_rows > self._memory.shape[1]:
                self._memory = torch.empty((2, num_rows), dtype=torch.int64, pin_memory=True)
            self._memory[0, :num_rows].copy_(chosen.tokens, non_blocking=True)
            self._memory[1, :num_rows].copy_(chosen.broken, non_blocking=True)
        self._marks[2].record()

    def wait(self) -> None:
        self._marks[2].synchronize()
        if self._ended_s is None:
            self._ended_s = time.perf_counter()

    def tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        found = self._memory[:, : self._num_rows].numpy().copy()
        return found[0], found[1].nonzero()[0]

    def times(self) -> Times:
        began, computed, ended = self._marks
        assert self._ended_s is not None, "call wait() first"
        model_s = began.elapsed_time(computed) / 1e3
        sample_s = computed.elapsed_time(ended) / 1e3
        return Times(model_s, sample_s, self._ended_s)


class Outcomes:
    """Makes the outcome of each step; on GPUs two alternate, as two steps may be under way.

    Args:
        device: where steps compute.
        num_rows: most rows that usually sample in a step; for more, memory is allocated.
    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self._outcomes: list[CudaOutcome] = []
        if device.type == "cuda":
            memory = torch.empty((2, 2, num_rows), dtype=torch.int64, pin_memory=True)
            self._outcomes = [CudaOutcome(memory[index]) for index in range(2)]

    def next(self) -> Outcome:
        """The outcome of the next step; the tokens of the one before last must have been read."""
        if not self._outcomes:
            return HostOutcome()
        self._outcomes.reverse()
        return self._outcomes[0]
