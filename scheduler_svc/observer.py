"""Turns what the core does into logs and metrics."""

import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

from scheduler_svc.core import events
from scheduler_svc.core.scheduler import Scheduler
from shared.logs import EventLog
from shared.messages.leases import KVGeometry
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from shared.metrics import SchedulerMetrics

log = EventLog(__name__)


class _Phase(Enum):
    QUEUED = auto()
    PREFILLING = auto()
    DECODING = auto()


class Observer:
    """Times are taken with this process's monotonic clock, in seconds.

    Args:
        clock_s: seconds that never go back.
    """

    def __init__(
        self, metrics: SchedulerMetrics, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._metrics = metrics
        self._clock_s = clock_s
        self._since: dict[str, tuple[_Phase, float]] = {}  # by request
        self._planned_s: dict[int, float] = {}
        self._blocks_counted_s: float | None = None  # when blocks of tenants were last counted

    def new_epoch(self, epoch: int, kv: KVGeometry, core: Scheduler) -> None:
        """Forget the plans of the epoch before, and the requests that ended with it."""
        self._planned_s.clear()
        self._since = {name: at for name, at in self._since.items() if core.find(name) is not None}
        self._metrics.epoch.set(epoch)
        self._metrics.kv_cache_capacity_bytes.set(kv.num_blocks * kv.bytes_per_block)

    def planned(self, plan: StepPlan) -> None:
        """A plan is about to be appended."""
        self._planned_s[plan.step] = self._clock_s()
        self._metrics.copied_blocks.inc(len(plan.copy_sources))
        self._metrics.swapped_blocks["out"].inc(len(plan.swap_out_host))
        self._metrics.swapped_blocks["in"].inc(len(plan.swap_in_host))

    def result(self, result: StepResult) -> None:
        """A result was read."""
        now_s = self._clock_s()
        if (planned_s := self._planned_s.pop(result.step, None)) is not None:
            self._metrics.round_trip_seconds.observe(now_s - planned_s)
        self._metrics.generation_tokens.inc(len(result.tokens))
        self._metrics.iteration_tokens.observe(result.num_batched_tokens)
        self._metrics.last_step_timestamp.set_to_current_time()

    def ticked(self, seconds: float) -> None:
        """Record how long the core worked in a tick, in seconds."""
        self._metrics.schedule_seconds.observe(seconds)

    def noted(self, taken: list[events.Event]) -> None:
        """Log and count what happened."""
        now_s = self._clock_s()
        for event in taken:
            match event:
                case events.Accepted():
                    self._since[event.request_id] = (_Phase.QUEUED, now_s)
                    if not event.recovered:
                        self._metrics.prompt_tokens.inc(event.num_prompt_tokens)
                    log.info(
                        "taken over" if event.recovered else "accepted",
                        request=event.request_id,
                        prompt_tokens=event.num_prompt_tokens,
                    )
                case events.Refused():
                    log.warning("refused", request=event.request_id, reason=event.reason)
                case events.Admitted():
                    self._admitted(event, now_s)
                case events.Preempted():
                    self._metrics.num_preemptions[event.kind].inc()
                    log.info(
                        "preempted",
                        request=event.request_id,
                        by=event.by,
                        kind=event.kind,
                        tokens=event.num_tokens,
                    )
                case events.Rewound():
                    log.warning(
                        "the log had lost what a client has; going on from there",
                        request=event.request_id,
                        generated_tokens=event.num_generated,
                    )
                case events.FirstToken():
                    if (since_s := self._in_phase(event.request_id, _Phase.PREFILLING)) is not None:
                        self._metrics.request_prefill_time.observe(now_s - since_s)
                    self._since[event.request_id] = (_Phase.DECODING, now_s)
                case events.Ended():
                    self._ended(event, now_s)
                case events.PrefixPinned():
                    log.info("prefix pinned", name=event.name, tokens=event.num_tokens)
                case events.PrefixRefused():
                    log.warning("prefix not pinned", name=event.name, reason=event.reason)
                case events.PrefixGivenUp():
                    self._metrics.prefixes_given_up.inc()
                    log.warning(
                        "pinned prefix given up",
                        name=event.name,
                        blocks=event.num_blocks,
                        request=event.by,
                    )

    def gauges(self, core: Scheduler, kv: KVGeometry) -> events.Stats:
        """Publish the state of queues and pool; the numbers are returned too."""
        stats = core.stats()
        slots = kv.num_blocks * kv.block_size
        bytes_per_slot = kv.bytes_per_block / kv.block_size
        metrics = self._metrics
        metrics.num_requests_running.set(stats.num_running)
        metrics.num_requests_waiting.set(stats.num_waiting)
        metrics.num_waiting_tokens.set(stats.num_waiting_tokens)
        metrics.num_requests_swapped.set(stats.num_swapped)
        metrics.kv_cache_usage_perc.set(stats.num_used_blocks / kv.num_blocks)
        metrics.kv_cache_token_usage_perc.set(stats.num_kv_tokens / slots)
        used_slots = stats.num_used_blocks * kv.block_size
        metrics.kv_cache_bytes["tokens"].set(stats.num_kv_tokens * bytes_per_slot)
        metrics.kv_cache_bytes["reserved"].set((used_slots - stats.num_kv_tokens) * bytes_per_slot)
        cached_slots = stats.num_cached_blocks * kv.block_size
        metrics.kv_cache_bytes["cached"].set(cached_slots * bytes_per_slot)
        pinned_slots = stats.num_pinned_unused_blocks * kv.block_size
        metrics.kv_cache_bytes["pinned"].set(pinned_slots * bytes_per_slot)
        free_slots = slots - used_slots - cached_slots - pinned_slots
        metrics.kv_cache_bytes["free"].set(free_slots * bytes_per_slot)
        metrics.pinned_prefixes.set(stats.num_pinned_prefixes)
        metrics.pinned_blocks.set(stats.num_pinned_blocks)
        metrics.shared_blocks.set(stats.num_shared_blocks)
        self._count_tenant_blocks(core)
        return stats

    def _count_tenant_blocks(self, core: Scheduler) -> None:
        """Add the blocks of each tenant, held since the last call; a shared one counts for each."""
        now_s = self._clock_s()
        since_s, self._blocks_counted_s = self._blocks_counted_s, now_s
        if since_s is None:
            return
        blocks: Counter[str] = Counter()
        for group in core.running:
            num_blocks = sum(len(sequence.block_table) for sequence in group.sequences)
            blocks[group.submit.tenant] += num_blocks
        for tenant, num_blocks in blocks.items():
            self._metrics.tenant_block_seconds.inc(num_blocks * (now_s - since_s), tenant)

    def log_lengths(self, lengths: dict[str, int]) -> None:
        """Publish how many entries each log holds."""
        for name, length in lengths.items():
            self._metrics.log_entries[name].set(length)

    def _admitted(self, event: events.Admitted, now_s: float) -> None:
        if (since_s := self._in_phase(event.request_id, _Phase.QUEUED)) is not None:
            self._metrics.request_queue_time.observe(now_s - since_s)
            del self._since[event.request_id]
        num_computed = event.num_tokens - event.num_reused
        if event.again:
            self._metrics.recomputed_tokens.inc(num_computed)
            self._metrics.tenant_tokens.inc(num_computed, event.tenant, "recomputed")
            log.info("admitted again", request=event.request_id, recomputed=num_computed)
        else:
            self._since[event.request_id] = (_Phase.PREFILLING, now_s)
            self._metrics.prefix_cache_queries.inc(event.num_tokens)
            self._metrics.prefix_cache_hits.inc(event.num_reused)
            self._metrics.tenant_tokens.inc(num_computed, event.tenant, "computed")
            self._metrics.tenant_tokens.inc(event.num_reused, event.tenant, "cached")

    def _ended(self, event: events.Ended, now_s: float) -> None:
        if (since_s := self._in_phase(event.request_id, _Phase.DECODING)) is not None:
            self._metrics.request_decode_time.observe(now_s - since_s)
        self._since.pop(event.request_id, None)
        self._metrics.tenant_tokens.inc(event.num_generated, event.tenant, "generated")
        log.info(
            "ended",
            request=event.request_id,
            reason=event.reason,
            generated_tokens=event.num_generated,
        )

    def _in_phase(self, request_id: str, phase: _Phase) -> float | None:
        """Since when, if it is in this phase."""
        now, since_s = self._since.get(request_id, (None, 0.0))
        return since_s if now is phase else None
