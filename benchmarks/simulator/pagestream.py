"""Our scheduler on the virtual clock: the real core, with a worker that computes nothing."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator.findings.occupancy import Occupancy
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, Work
from benchmarks.simulator.worker.beam_samples import BeamDraws
from benchmarks.simulator.worker.plan_rows import Rows
from benchmarks.simulator.worker.worker_model import Worker
from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.events import Ended, FirstToken, Preempted
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.plan_draft import PlanDraft
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.outputs import RequestEnded, RequestState
from shared.messages.requests import Submit
from shared.sampling import BeamParams, EarlyStopping, SamplingParams

_AT = EntryId(1, 0)  # entry of every message: nothing here depends on it


@dataclass(frozen=True, slots=True)
class PageStreamConfig:
    """Settings of the scheduler, named as those of its service.

    Attributes:
        block_size: tokens.
        max_num_sequences: running at once.
        max_num_batched_tokens: of one step.
        max_plans_in_flight: 1 waits for each result before it plans.
        watermark: share of the blocks kept free on admission.
        prefix_caching: whether unreferenced blocks stay in the prefix cache.
        preemption: see ``Preemption``.
        host_slots: token slots of the host pool; None: as many as on the device.
        kv_slots: token slots of the device; None: those of the worker.
        max_model_len: tokens; None: the model's.
    """

    block_size: int = 16
    max_num_sequences: int = 256
    max_num_batched_tokens: int = 2_048
    max_plans_in_flight: int = 2
    watermark: float = 0.01
    prefix_caching: bool = True
    preemption: str = Preemption.AUTO
    host_slots: int | None = None
    kv_slots: int | None = None
    max_model_len: int | None = None

    def for_core(self, worker: Worker) -> SchedulerConfig:
        """The core's settings for a worker."""
        slots = worker.kv_slots if self.kv_slots is None else self.kv_slots
        num_blocks = slots // self.block_size
        host_slots = slots if self.host_slots is None else self.host_slots
        swaps = self.preemption != Preemption.RECOMPUTE
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len or worker.model.max_model_len,
            max_num_sequences=self.max_num_sequences,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_plans_in_flight=self.max_plans_in_flight,
            num_watermark_blocks=int(self.watermark * num_blocks),
            outputs_retention=10_000,
            prefix_caching=self.prefix_caching,
            num_host_blocks=host_slots // self.block_size if swaps else 0,
            preemption=self.preemption,
            recompute_us_per_token=worker.recompute_us_per_token(),
            swap_us_per_block=worker.swap_us_per_block(self.block_size),
            resume_window_ms=0,
        )


class PageStream:
    """A ``System`` with our scheduler core.

    Clients request exactly the tokens that they get, as load generators do. The scheduler uses this
    limit only to allocate no block beyond it.

    Args:
        worker: determines the size of the pool, and the costs of preemption.
        config: of the scheduler.
        seed: of the random continuations of beams.
    """

    def __init__(
        self, worker: Worker, config: PageStreamConfig | None = None, seed: int = 0
    ) -> None:
        config = config or PageStreamConfig()
        self._core_config = config.for_core(worker)
        self._slots = worker.kv_slots if config.kv_slots is None else config.kv_slots
        self._num_blocks = self._core_config.num_blocks
        self._block_size = self._core_config.block_size
        self._num_lost = self._slots - self._num_blocks * self._block_size
        self._core = Scheduler(self._core_config)
        self._rows = Rows(
            config.max_num_sequences,
            config.block_size * worker.model.kv_bytes_per_token,
            worker.swap_copies(1),
            BeamDraws(np.random.default_rng(seed)),
        )
        self._max_plans_in_flight = self._core_config.max_plans_in_flight
        self._plans: deque[PlanDraft] = deque()
        self._started: PlanDraft | None = None
        self._sampling: dict[tuple[int, int], SamplingParams] = {}
        self._not_begun: dict[int, int] = {}  # beam searches' requests, by the group's handle
        self._num_preemptions = 0
        self._occupancy: Occupancy | None = Occupancy(config.block_size)  # None: there are beams
        self._is_followed = False  # whether ``_occupancy`` is up to date with the core

    def submit(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the scheduler refuses it; with the reason.
        """
        submit = Submit(
            request_id=str(request.id),
            gateway="",
            attachment="",
            prompt=_prompt(request),
            sampling=self._sampling_of(request),
            received_ms=0,
            num_choices=request.beam_width or request.num_samples,
            priority=0,
            cache_salt="",
        )
        if request.beam_width:
            self._occupancy = None
        for answer in self._core.apply(submit, _AT):
            if isinstance(answer, RequestEnded):
                raise ValueError(f"request {request.id}: {answer.error}")
            if request.beam_width and isinstance(answer, RequestState):
                self._not_begun[answer.choices[0].handle] = request.id

    def start(self, now_s: float) -> Work | None:
        """Plan as far ahead as the scheduler does; the work of the earliest plan."""
        now_ms = int(1_000 * now_s)
        plans, occupancy = self._plans, self._occupancy
        self._is_followed = occupancy is not None
        while len(plans) < self._max_plans_in_flight:
            plan = self._core.draft(now_ms)
            if plan is None:
                self._is_followed = False  # sequences that ended since the last plan are in no plan
                break
            plans.append(plan)
            if occupancy is not None:
                occupancy.plan(plan)
        if not plans:
            return None
        self._started = plans.popleft()
        return self._rows.begin(self._started)

    def finish(self, now_s: float) -> Progress:  # noqa: ARG002
        """Pass the result to the scheduler."""
        assert self._started is not None, "an iteration was started"
        plan, self._started = self._started, None
        self._is_followed = False
        rows = self._rows
        num_tokens = rows.num_sampled
        handles, tokens = rows.end(plan.step)
        ended = [(handle, EndFlag.LENGTH) for handle in rows.ended]
        self._core.apply_result(plan.step, handles, tokens, ended, rows.candidates)
        first: list[int] = []
        finished: list[int] = []
        for event in self._core.take_events():
            if isinstance(event, FirstToken):
                first.append(int(event.request_id))
            elif isinstance(event, Ended):
                finished.append(int(event.request_id))
            elif isinstance(event, Preempted):
                self._num_preemptions += 1
        for step in plan.beams:
            if step.group in self._not_begun:
                first.append(self._not_begun.pop(step.group))
        return Progress(tuple(first), tuple(finished), num_tokens)

    def memory(self) -> MemoryUse:
        """Memory use as of the last plan."""
        found = self._occupancy
        if found is None or not self._is_followed:
            return self._seen()
        num_tokens = found.num_tokens
        num_unfilled, num_reserved = found.num_slots - num_tokens, found.num_useful - num_tokens
        return self._use(num_unfilled, num_reserved, found.num_references)

    def _seen(self) -> MemoryUse:
        """Memory use by a pass over every running sequence."""
        block_size = self._block_size
        reserved: dict[int, int] = {}  # by the last block of each table, which several may share
        unfilled: dict[int, int] = {}
        num_references = 0
        step = self._core.planned_step
        for group in self._core.running:
            final = group.num_prompt_tokens + group.max_output - 1
            for sequence in group.sequences:
                table = sequence.block_table
                if table:
                    num_tokens = group.kv_tokens_at(step, sequence)
                    left = len(table) * block_size - num_tokens
                    unfilled[table[-1]] = left
                    num_references += len(table)
                    reserved[table[-1]] = min(left, final - num_tokens)
        return self._use(sum(unfilled.values()), sum(reserved.values()), num_references)

    def _use(self, num_unfilled: int, num_reserved: int, num_references: int) -> MemoryUse:
        block_size = self._block_size
        num_free = self._core.pool.num_free
        num_used = self._num_blocks - num_free
        return MemoryUse(
            self._slots,
            num_used * block_size - num_unfilled,
            num_reserved,
            num_unfilled - num_reserved,
            self._num_lost,
            num_free * block_size,
            (num_references - num_used) * block_size,
        )

    @property
    def core(self) -> Scheduler:
        """The scheduler core, for inspection."""
        return self._core

    @property
    def num_running(self) -> int:
        """Requests with blocks on the device."""
        return len(self._core.running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks on the device."""
        return self._core.num_requests - len(self._core.running)

    @property
    def num_preemptions(self) -> int:
        """Preempted requests since the start."""
        return self._num_preemptions

    def _sampling_of(self, request: SimRequest) -> SamplingParams:
        """Sampling parameters, shared by requests with the same ones."""
        key = (request.output_tokens, request.beam_width)
        found = self._sampling.get(key)
        if found is None:
            found = self._sampling[key] = _sampling(*key)
        return found


def _sampling(max_tokens: int, beam_width: int) -> SamplingParams:
    greedy = SamplingParams.greedy(max_tokens)
    if not beam_width:
        return greedy
    return replace(greedy, beams=BeamParams(beam_width, 1.0, EarlyStopping.ESTIMATED))


# Made-up tokens from here on are unique to one request; those below are of shared prefixes.
_OWN = 1 << 30


def _prompt(request: SimRequest) -> IntArray:
    """Tokens that are equal for equal prefixes, and otherwise unique to the request."""
    own = _OWN | request.id & (_OWN - 1)
    if not request.prefix:
        prompt = np.empty(request.prompt_tokens, np.int32)
        prompt.fill(own)
        return prompt
    ids = np.array(request.prefix, np.int64).astype(np.int32) & (_OWN - 1)
    shared = np.repeat(ids, request.prefix_block_tokens)[: request.prompt_tokens]
    rest = np.full(request.prompt_tokens - len(shared), own, np.int32)
    return np.concatenate([shared, rest])
