"""What a step sampled, on its way to the host, and how long the device took for it."""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.sampler import Chosen


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step.

    Attributes:
        model_s: of the forward pass.
        sample_s: of choosing tokens.
        ended_s: when the tokens were there, by ``time.perf_counter``.
    """

    model_s: float
    sample_s: float
    ended_s: float


class Outcome(Protocol):
    """One step, from its forward pass to its tokens; its calls come in this order."""

    def model_begins(self) -> None:
        """The forward pass is about to be queued."""

    def model_ended(self) -> None:
        """It is queued, and so is all that depends on logits alone."""

    def sampled(self, chosen: Chosen | None) -> None:
        """The tokens of the R rows that sample are queued; None: no row does."""

    def wait(self) -> None:
        """Until all of it is done; from any thread."""

    def tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens [R] and the rows that were no numbers, once they are there."""

    def times(self) -> Times:
        """Where the time went, once everything is done."""


class HostOutcome:
    """Of a step on the CPU, where everything is done when it is called."""

    def __init__(self) -> None:
        self._marks: list[float] = []
        self._tokens = self._broken = np.empty(0, np.int64)

    def model_begins(self) -> None:
        self._marks.append(time.perf_counter())

    def model_ended(self) -> None:
        self._marks.append(time.perf_counter())

    def sampled(self, chosen: Chosen | None) -> None:
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
    """Of a step on a GPU: copied into pinned memory behind the step, marked by events.

    Args:
        memory: tokens [n] and flags [n], both int64 and pinned, [2, n]; nobody else's until
            ``tokens`` was called.
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

    def sampled(self, chosen: Chosen | None) -> None:
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
        assert self._ended_s is not None, "nobody has waited"
        model_s = began.elapsed_time(computed) / 1e3
        sample_s = computed.elapsed_time(ended) / 1e3
        return Times(model_s, sample_s, self._ended_s)


class Outcomes:
    """Gives each step an outcome; on GPUs two take turns, for two steps may be under way.

    Args:
        device: where steps compute.
        num_rows: that sample in one step, at most; more cost memory of their own.
    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self._turns: list[CudaOutcome] = []
        if device.type == "cuda":
            memory = torch.empty((2, 2, num_rows), dtype=torch.int64, pin_memory=True)
            self._turns = [CudaOutcome(memory[turn]) for turn in range(2)]

    def next(self) -> Outcome:
        """For the next step; the one before last must have been read."""
        if not self._turns:
            return HostOutcome()
        self._turns.reverse()
        return self._turns[0]
