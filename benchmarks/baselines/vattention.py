"""vAttention's memory: contiguous virtual tensors, backed by page groups that are mapped on demand.

Every worker has a K and a V tensor for each of its layers; a request occupies a part of each,
mapped in page groups of 64 KiB to 2 MiB (sections 5 and 7.6.3 of the paper).
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from benchmarks.baselines.continuous import ContinuousBatch, Job
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, Work


@dataclass(frozen=True, slots=True)
class PageGroups:
    """The parameters of one worker that determine how many tokens a page group holds.

    Attributes:
        group_bytes: of a page group.
        num_layers: of the worker.
        num_kv_heads: of each layer of the worker.
        head_dim: of each head.
        value_bytes: of one number.
    """

    group_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_bytes: int = 2

    @property
    def block_size(self) -> int:
        """Tokens in a page group (Table 8)."""
        return self.group_bytes // (self.num_kv_heads * self.head_dim * self.value_bytes)

    @property
    def num_tensors(self) -> int:
        """Tensors, each of which needs page groups of its own."""
        return 2 * self.num_layers

    def num_blocks(self, num_tokens: int) -> int:
        """Page groups in each tensor for so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_in(self, num_bytes: int) -> int:
        """Page groups for each tensor in so much memory of a worker."""
        return num_bytes // (self.group_bytes * self.num_tensors)


class VAttention:
    """First come, first served, on demand; the latest request is preempted if page groups run out.

    A block is a page group in every tensor of every worker. Page groups of a complete request stay
    mapped and are given to the next one (deferred reclamation, section 6.1.2).

    Args:
        groups: the page groups.
        memory_bytes: of a worker, for keys and values.
        max_num_sequences: running at once.
        watermark: share of the blocks that is kept free when a request is admitted.
    """

    def __init__(
        self,
        groups: PageGroups,
        memory_bytes: int,
        max_num_sequences: int = 512,
        watermark: float = 0.01,
    ) -> None:
        self.num_blocks = groups.num_blocks_in(memory_bytes)
        if not self.num_blocks:
            raise ValueError(f"{memory_bytes} bytes hold no page group for each tensor")
        self.num_preemptions = 0
        self._groups = groups
        self._max_num_sequences = max_num_sequences
        self._num_watermark = int(watermark * self.num_blocks)
        self._batch = ContinuousBatch()
        self._blocks: dict[int, int] = {}  # mapped for each running request
        self._idle: list[int] = []  # blocks still mapped for complete requests, ascending
        self._num_free = self.num_blocks  # mapped nowhere
        # By iteration, the jobs that need another block in it.
        self._opens: defaultdict[int, list[Job]] = defaultdict(list)
        self._waiting: deque[Job] = deque()

    def submit(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it is longer than the memory, or has several sequences.
        """
        job = Job(request)
        if job.num_sequences > 1:
            raise ValueError("a request has one sequence here")
        needed = self._groups.num_blocks(request.prompt_tokens + request.output_tokens)
        if needed > self.num_blocks:
            raise ValueError(f"{needed} blocks are needed, there are {self.num_blocks}")
        self._waiting.append(job)

    def start(self, now_s: float) -> Work | None:  # noqa: ARG002
        """Map blocks for requests that grow, then admit requests that fit."""
        mapped = self._grow()
        while self._waiting and len(self._batch.jobs) < self._max_num_sequences:
            job = self._waiting[0]
            needed = self._groups.num_blocks(job.num_tokens + 1)
            reserve = self._num_watermark if self._batch.jobs else 0
            if needed + reserve > self._num_free + sum(self._idle):
                break
            self._waiting.popleft()
            mapped += self._map_new(job, needed)
            self._batch.join(job)
            self._schedule_growth(job)
        if not self._batch.jobs:
            return None
        work = self._batch.work()
        work.mapped_pages = mapped * self._groups.num_tensors
        return work

    def finish(self, now_s: float) -> Progress:  # noqa: ARG002
        """End an iteration: a token more for each request; complete ones leave blocks mapped."""
        progress = self._batch.advance()
        for request_id in progress.finished:
            self._leave(request_id)
        return progress

    def memory(self) -> MemoryUse:
        """Memory use; mapped slots will be filled, except at the ends of last blocks."""
        size, states = self._groups.block_size, self._batch.num_states
        used = sum(self._blocks.values())
        total, free = self.num_blocks * size, (self.num_blocks - used) * size
        return MemoryUse(total, states, 0, used * size - states, 0, free)

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._batch.jobs)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, preempted ones included."""
        return len(self._waiting)

    def _grow(self) -> int:
        """Map a block for each request whose last one is full; the number of mapped blocks."""
        mapped = 0
        for job in self._opens.pop(self._batch.num_iterations, []):
            if self._batch.jobs.get(job.request.id) is not job:
                continue  # preempted, perhaps by an earlier request
            while not self._take(1):
                victim = next(reversed(self._batch.jobs.values()))
                self._preempt(victim)
                if victim is job:
                    break
            else:
                mapped += 1
                self._blocks[job.request.id] += 1
                self._schedule_growth(job)
        return mapped

    def _schedule_growth(self, job: Job) -> None:
        """Record the iteration in which the job's blocks are full, if it runs until then."""
        room = self._blocks[job.request.id] * self._groups.block_size
        length = job.request.prompt_tokens + self._batch.num_generated(job)
        if room < job.request.prompt_tokens + job.request.output_tokens:
            self._opens[self._batch.num_iterations + room - length].append(job)

    def _map_new(self, job: Job, needed: int) -> int:
        """Assign tensors to a job; page groups that are mapped there already need no mapping."""
        found = self._idle.pop() if self._idle else 0
        self._blocks[job.request.id] = max(found, needed)
        mapped = max(needed - found, 0)
        taken = self._take(mapped)
        assert taken, f"{mapped} blocks, {self._num_free} free, {self._idle} idle"
        return mapped

    def _take(self, num_blocks: int) -> bool:
        """Take free blocks; unmap idle ones if there are too few."""
        while self._num_free < num_blocks and self._idle:
            self._num_free += self._idle.pop(0)
        if self._num_free < num_blocks:
            return False
        self._num_free -= num_blocks
        return True

    def _preempt(self, victim: Job) -> None:
        """Preempt a job; it is recomputed before all other waiting requests."""
        self.num_preemptions += 1
        self._batch.leave(victim)
        self._leave(victim.request.id)
        for jobs in self._opens.values():
            if victim in jobs:
                jobs.remove(victim)
        self._waiting.appendleft(victim)

    def _leave(self, request_id: int) -> None:
        self._idle.append(self._blocks.pop(request_id))
        self._idle.sort()
