"""Orca as described in PagedAttention, section 6.1: iteration-level scheduling, reserved memory."""

from collections import deque
from enum import StrEnum

from benchmarks.baselines.buddy import BuddyAllocator, Run, size_of_run
from benchmarks.baselines.continuous import ContinuousBatch, Job, num_sequences
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, Work


class Reservation(StrEnum):
    """How much contiguous memory a sequence reserves before it starts."""

    MAX = "max"  # the model's maximum
    POW2 = "pow2"  # its prompt, and its output rounded up to a power of two
    ORACLE = "oracle"  # exactly what it will need

    def num_slots(self, request: SimRequest, max_len: int) -> int:
        """Slots for each sequence of a request."""
        if self is Reservation.MAX:
            return max_len
        output = request.output_tokens
        if self is Reservation.POW2:
            output = size_of_run(output)
        return min(request.prompt_tokens + output, max_len)


class Orca:
    """First come, first served; admitted requests run in every iteration and are never preempted.

    Every sequence has a run of its own from a buddy allocator, so nothing is shared: each sample
    computes and keeps the prompt, and each beam keeps all tokens that it descends from.

    Args:
        num_slots: tokens of KV memory.
        reservation: how much each sequence reserves.
        max_len: tokens of the longest sequence that the model can have.
        max_num_sequences: running at once.
        copied_bytes_per_token: moved in each iteration for each token of a request with beams,
            because beams with the same parent each need a copy of all its tokens.
    """

    def __init__(
        self,
        num_slots: int,
        reservation: Reservation,
        max_len: int = 2_048,
        max_num_sequences: int = 256,
        copied_bytes_per_token: float = 0.0,
    ) -> None:
        self._copied_bytes_per_token = copied_bytes_per_token
        self._reservation = reservation
        self._max_len = max_len
        self._max_num_sequences = max_num_sequences
        self._buddy = BuddyAllocator(num_slots)
        self._batch = ContinuousBatch()
        self._running: dict[int, tuple[SimRequest, list[Run]]] = {}
        self._waiting: deque[Job] = deque()
        self._possible: dict[tuple[int, int], bool] = {}
        self._num_sequences = 0
        self._num_needed = 0  # slots that hold a token when their request is complete
        self._num_reserved = 0  # slots before rounding up to a run

    def submit(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it is longer than the model or the memory.
        """
        length, rows = request.prompt_tokens + request.output_tokens, num_sequences(request)
        if length > self._max_len:
            raise ValueError(f"{length} tokens, at most {self._max_len} are possible")
        if rows > self._max_num_sequences:
            raise ValueError(f"{rows} sequences, at most {self._max_num_sequences} run at once")
        slots = self._reservation.num_slots(request, self._max_len)
        if not self._fit_alone(rows, size_of_run(slots)):
            raise ValueError(f"{rows} x {slots} slots do not fit into {self._buddy.num_slots}")
        self._waiting.append(Job(request))

    def start(self, now_s: float) -> Work | None:  # noqa: ARG002
        """Admit requests that fit, in order; all running ones compute."""
        while self._waiting and self._admit(self._waiting[0]):
            self._batch.join(self._waiting.popleft())
        if not self._batch.jobs:
            return None
        work = self._batch.work()
        if self._has_copies:
            work.copied_bytes = self._copied_bytes()
        return work

    def finish(self, now_s: float) -> Progress:  # noqa: ARG002
        """End an iteration: each running request has a token more, and complete ones leave."""
        progress = self._batch.advance()
        for request_id in progress.finished:
            request, runs = self._running.pop(request_id)
            for run in runs:
                self._buddy.free(run)
            self._count(request, -1)
        return progress

    def memory(self) -> MemoryUse:
        """Memory use; rounding up to a run is external fragmentation: it is known in advance."""
        states = self._batch.num_states
        free = self._buddy.num_free
        rounding = self._buddy.num_slots - free - self._num_reserved
        lost = free if self._waiting else 0  # no free piece fits the first waiting request
        return MemoryUse(
            total=self._buddy.num_slots,
            token_states=states,
            reserved=self._num_needed - states,
            internal=self._num_reserved - self._num_needed,
            external=rounding + lost,
            free=free - lost,
        )

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._batch.jobs)

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """Always 0: memory is reserved for all that a request needs."""
        return 0

    @property
    def _has_copies(self) -> bool:
        return self._copied_bytes_per_token > 0

    def _copied_bytes(self) -> int:
        jobs = [job for job in self._batch.jobs.values() if job.request.beam_width]
        lengths = [job.request.prompt_tokens + self._batch.num_generated(job) for job in jobs]
        return int(self._copied_bytes_per_token * sum(lengths))

    def _fit_alone(self, rows: int, size: int) -> bool:
        """Whether so many runs can be allocated at once."""
        if (rows, size) not in self._possible:
            empty = BuddyAllocator(self._buddy.num_slots)
            found = [empty.allocate(size) for _ in range(rows)]
            self._possible[rows, size] = None not in found
        return self._possible[rows, size]

    def _admit(self, job: Job) -> bool:
        if self._num_sequences + job.num_sequences > self._max_num_sequences:
            return False
        slots = self._reservation.num_slots(job.request, self._max_len)
        runs: list[Run] = []
        for _ in range(job.num_sequences):
            run = self._buddy.allocate(slots)
            if run is None:
                for found in runs:
                    self._buddy.free(found)
                return False
            runs.append(run)
        self._running[job.request.id] = job.request, runs
        self._count(job.request, 1)
        return True

    def _count(self, request: SimRequest, sign: int) -> None:
        rows = sign * num_sequences(request)
        self._num_sequences += rows
        self._num_needed += rows * (request.prompt_tokens + request.output_tokens)
        self._num_reserved += rows * self._reservation.num_slots(request, self._max_len)
