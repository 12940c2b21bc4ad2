"""The scheduling policy: which groups run in a step, which wait, and which lose their blocks.

Iteration-level scheduling over a paged pool (PagedAttention, section 4.5). A sequence group, all
sequences of one request, runs as a whole or not at all. It is *waiting* until it is admitted,
*running* while it holds blocks, and *preempted* once it lost them. A preempted group is *swapped*
if the host pool keeps its keys and values; otherwise they are recomputed.

Groups are ranked by priority, then by arrival. Each step is planned in this order:

1. Blocks. Each running group gets the blocks that its next tokens need. While too few are free,
   the last running group by rank is preempted.
2. Token budget. Every decoding sequence takes one token. The rest goes to prompts, which may have
   a smaller budget while others decode.
3. Prefill. Admitted groups compute their prompts in chunks, by rank.
4. Admission. While budget is left, the first by rank of all waiting and preempted groups is
   admitted, if it gets a slot for each sequence (of ``max_num_sequences``) and blocks for all its
   tokens. While others run, a watermark of blocks stays free beyond these. If it lacks blocks, no
   later group is admitted.

Exceptions:
* A waiting group that lacks slots may be passed by later ones for some steps (bounded backfill).
* Pinned prefixes are given up for a group that has no other way to run.
* A group that was computed when workers died twice in a row runs alone until it gets further.
* Groups that compute pinned prefixes go back to the waiting ones instead of being preempted.
* A group that recomputes several sequences may start over when one of them ends.
* A draining engine admits no waiting group.
"""

from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.sequences.queues import BY_RANK
from scheduler_svc.core.sequences.sequence import FINISHING, PREEMPTED, PREFILLING, SequenceGroup
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.core.step.planner import StepPlanner

ALONE_AFTER_DEATHS = 2  # of workers in a row that computed the group


class SchedulingPolicy:
    """Decides what each step contains; the planner carries it out."""

    def __init__(self, config: SchedulerConfig, planner: StepPlanner) -> None:
        self.is_draining = False  # whether the engine is about to stop
        self._config = config
        self._planner = planner
        self._queues = planner.queues

    def schedule(self, draft: PlanDraft) -> bool:
        """Put the next step into an empty draft; whether there is anything to compute."""
        self._planner.finish_at_limit(draft.step)
        self._grow_running(draft)
        num_decoding = self._queues.num_decoding
        draft.budget -= num_decoding
        draft.prompt_budget = draft.budget
        if self._config.max_prompt_tokens and (num_decoding or draft.beams):
            draft.prompt_budget = min(draft.budget, self._config.max_prompt_tokens)
        for group in self._queues.prefilling.copy():
            if draft.prompt_budget <= 0:
                break
            self._planner.prefill(group, draft)
        self._admit(draft)
        return num_decoding > 0 or not draft.is_empty

    # ------------------------------------------------------------ preemption

    def _grow_running(self, draft: PlanDraft) -> None:
        """Give running groups the blocks that their next tokens need."""
        due = self._planner.blocks.due(draft.step)
        if due and not self._planner.blocks.grow_all(due, draft):
            for group in sorted(due, key=BY_RANK):
                if group.state is not PREEMPTED:
                    self._grow_or_preempt(group, draft)

    def _grow_or_preempt(self, group: SequenceGroup, draft: PlanDraft) -> None:
        running = self._queues.running
        while not self._planner.blocks.grow(group, draft):
            # A group whose last token is planned frees its blocks soon anyway.
            victim = next(found for found in reversed(running) if found.state is not FINISHING)
            if victim is group is running[0] and self._planner.give_up_prefix(group, draft):
                continue
            self._preempt(victim, group, draft)
            if victim is group:
                return

    def _preempt(self, victim: SequenceGroup, beneficiary: SequenceGroup, draft: PlanDraft) -> None:
        if victim.computes_prefix:
            self._planner.requeue(victim)
        else:
            kind = self._kind_of_preemption(victim)
            self._planner.preempt(victim, beneficiary, kind, draft)

    def _kind_of_preemption(self, victim: SequenceGroup) -> Preemption:
        """Swap if that is wanted and possible, and, with ``auto``, cheaper than recomputation."""
        config, wanted = self._config, self._config.preemption
        num_blocks = self._planner.num_blocks_of(victim)
        has_room = num_blocks <= self._planner.num_free_host_blocks
        if victim.state is PREFILLING or wanted == Preemption.RECOMPUTE or not has_room:
            return Preemption.RECOMPUTE  # half a prompt is not worth a swap
        swap_us = 2 * num_blocks * config.swap_us_per_block
        recompute_us = num_blocks * config.block_size * config.recompute_us_per_token
        is_cheaper = wanted == Preemption.SWAP or swap_us < recompute_us
        return Preemption.SWAP if is_cheaper else Preemption.RECOMPUTE

    # ------------------------------------------------------------- admission

    def _admit(self, draft: PlanDraft) -> None:
        running = self._queues.running
        while draft.prompt_budget > 0 and not (running and _must_run_alone(running[0])):
            group = self._next_to_admit(draft.step)
            if group is None or group.num_slots > self._planner.num_free_slots:
                return
            if running and _must_run_alone(group):
                return
            watermark = self._config.num_watermark_blocks if running else 0
            while not self._planner.allocate(group, watermark, draft):
                has_alternative = running or group.computes_prefix
                if has_alternative or not self._planner.give_up_prefix(group, draft):
                    return
            self._planner.admit(group, draft)
            self._planner.prefill(group, draft)

    def _next_to_admit(self, step: int) -> SequenceGroup | None:
        """The first by rank of waiting and preempted groups, None if it is not ready."""
        preempted = next(iter(self._queues.preempted), None)
        # A preempted group waits for the results of its last plans; then its slots are free.
        is_ready = preempted is not None and self._planner.free_slots_of_preempted(preempted)
        waiting = None if self.is_draining else self._next_waiting(step)
        if preempted is None or (waiting is not None and waiting.rank < preempted.rank):
            return waiting
        return preempted if is_ready else None

    def _next_waiting(self, step: int) -> SequenceGroup | None:
        """The first waiting group, or one that may pass it, None if it lacks slots.

        Slots that become free are kept for a group that was passed for ``max_passing_steps``.
        """
        first = self._queues.first_waiting()
        if first is None or first.num_slots <= self._planner.num_free_slots:
            return first
        first.passed_since = first.passed_since or step
        if step - first.passed_since >= self._config.max_passing_steps:
            return None
        later = self._queues.first_waiting(self._planner.num_free_slots)
        same_priority = later is not None and later.submit.priority == first.submit.priority
        return later if same_priority else None


def _must_run_alone(group: SequenceGroup) -> bool:
    return group.num_deaths >= ALONE_AFTER_DEATHS
