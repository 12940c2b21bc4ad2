"""The scheduling policy: which groups run in a step, which wait, and which lose their blocks.

Iteration-level scheduling over a paged pool (PagedAttention, section 4.5). A sequence group, all
sequences of one request, runs as a whole or not at all. It is *waiting* until it is admitted,
*running* while it holds blocks, and *preempted* once it lost them. A preempted group is *swapped*
if the host pool keeps its keys and values; otherwise they are recomputed.

Waiting groups are taken by priority, then by the service that their tenant has received (virtual
token counters, see ``tenant_service.py``), then by arrival. Admitted groups are ranked by priority,
then by admission. Each step is planned in this order:

1. Blocks. Each running group gets the blocks that its next tokens need. While too few are free,
   the last running group by rank is preempted.
2. Token budget. Every decoding sequence takes one token. The rest goes to prompts, which may have
   a smaller budget while others decode.
3. Prefill. Admitted groups compute their prompts in chunks, by rank. While all that wait would fit
   into the step, the first may take the whole budget, and others fill the step only up to a number
   of tokens that keeps the worker busy: beyond it they would delay the first one's token. While
   more wait, steps are filled, which is a little faster for all.
4. Admission. While budget is left, the first preempted group, or the first waiting one if it is
   more urgent, is admitted, if it gets a slot for each sequence (of ``max_num_sequences``) and
   blocks for all its tokens. While others run, a watermark of blocks stays free beyond these. If it
   lacks blocks, no later group is admitted.

Fairness between tenants, if there are several:
* While too few blocks are free, the last group of a tenant that has several is preempted.
* A waiting group whose tenant has nothing running goes before preempted groups of tenants that
  have, and displaces the last group of the tenant with most running sequences, if that one has
  several groups. It needs at most its equal share of the slots.

* While several tenants have requests, a step has a limit of tokens (see ``shared_steps.py``). Each
  tenant may run its share of them. Others leave the rest to tenants with more: their last groups
  are preempted, and their prompts computed in smaller chunks.

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
from scheduler_svc.core.sequences.sequence import (
    FINISHING,
    PREEMPTED,
    PREFILLING,
    WAITING,
    SequenceGroup,
)
from scheduler_svc.core.sequences.shared_steps import SharedSteps
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
        self._shared = SharedSteps(config, planner.queues.tenants)
        self._claimant: SequenceGroup | None = None  # a waiting group that displaces others
        self._lacks_blocks = False  # it has slots, but too few blocks

    def schedule(self, draft: PlanDraft) -> bool:
        """Put the next step into an empty draft; whether there is anything to compute."""
        self._queues.tenants.step = draft.step
        self._planner.finish_at_limit(draft.step)
        self._displace(draft)
        self._shared.begin()
        if self._shared.is_exceeded:
            self._shorten_step(draft)
        self._grow_running(draft)
        num_decoding = self._queues.num_decoding
        draft.budget -= num_decoding
        draft.prompt_budget = draft.budget
        if self._config.max_prompt_tokens and (num_decoding or draft.beams):
            draft.prompt_budget = min(draft.budget, self._config.max_prompt_tokens)
        self._shared.save(num_decoding)
        enough = self._config.enough_prompt_tokens
        if enough and self._queues.num_waiting_tokens <= draft.prompt_budget:
            draft.first_prompt_budget = max(0, draft.prompt_budget - enough)
        for group in self._queues.prefilling.copy():
            if draft.prompt_budget <= 0:
                break
            self._prefill(group, draft)
        self._admit(draft)
        return num_decoding > 0 or not draft.is_empty

    # ------------------------------------------------------------ preemption

    def _grow_running(self, draft: PlanDraft) -> None:
        """Give running groups the blocks that their next tokens need."""
        due = self._planner.blocks.due(draft.step)
        if due and not self._planner.blocks.grow_all(due, draft):
            grown: set[SequenceGroup] = set()
            for group in sorted(due, key=BY_RANK):
                if group.state is not PREEMPTED:
                    self._grow_or_preempt(group, grown, draft)
                    grown.add(group)

    def _grow_or_preempt(
        self, group: SequenceGroup, grown: set[SequenceGroup], draft: PlanDraft
    ) -> None:
        running = self._queues.running
        while not self._planner.blocks.grow(group, draft):
            victim = self._next_victim(grown)
            if victim is group is running[0] and self._planner.give_up_prefix(group, draft):
                continue
            self._preempt(victim, group, draft)
            if victim is group:
                return

    def _next_victim(self, grown: set[SequenceGroup]) -> SequenceGroup:
        """The last by rank; with fairness, of the last ones by priority whose tenants have several.

        A group whose last token is planned frees its blocks soon anyway.

        Args:
            grown: groups that got blocks in this step, which stand in the plan.
        """
        found = (
            group
            for group in reversed(self._queues.running)
            if group.state is not FINISHING and group not in grown
        )
        last = next(found)
        if not self._config.fair_queueing:
            return last
        tenants = self._queues.tenants
        victim = last
        while victim.submit.priority == last.submit.priority:
            if victim.computes_prefix or tenants.num_groups(victim.submit.tenant) > 1:
                return victim
            if (victim := next(found, last)) is last:
                break
        return last

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
            if group is None:
                return
            if group.num_slots > self._planner.num_free_slots:
                if self._free_slots_of_preempted():
                    continue  # now another group may be the next
                return
            if running and _must_run_alone(group):
                return
            if self._shared.would_exceed(group) and self._gives_way(group):
                return
            if group.is_swapped and draft.swap_out_device:
                return  # a plan swaps one way
            watermark = self._config.num_watermark_blocks if running else 0
            while not self._planner.allocate(group, watermark, draft):
                if self._victim_for(group) is not None:
                    self._claimant, self._lacks_blocks = group, True
                has_alternative = running or group.computes_prefix
                if has_alternative or not self._planner.give_up_prefix(group, draft):
                    return
            self._planner.admit(group, draft)
            self._prefill(group, draft)

    def _prefill(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Plan a group's next tokens; those of tenants beyond their share have a budget."""
        if self._shared.is_beyond_share(group.submit.tenant) and self._gives_way(group):
            budget = min(draft.prompt_budget, self._shared.prompt_budget)
            rest = draft.prompt_budget - budget
            draft.prompt_budget = budget
            self._planner.prefill(group, draft)
            self._shared.prompt_budget -= budget - draft.prompt_budget
            draft.prompt_budget += rest
        else:
            self._planner.prefill(group, draft)
        draft.prompt_budget -= draft.first_prompt_budget
        draft.first_prompt_budget = 0

    def _free_slots_of_preempted(self) -> bool:
        """Let preempted groups give back slots that they do not need now; whether one did."""
        num_free = self._planner.num_free_slots
        for group in self._queues.preempted:
            self._planner.free_slots_of_preempted(group)
        return self._planner.num_free_slots > num_free

    def _next_to_admit(self, step: int) -> SequenceGroup | None:
        """The first of waiting and preempted groups, None if it is not ready."""
        preempted = next(iter(self._queues.preempted), None)
        # A preempted group waits for the results of its last plans; then its slots are free.
        is_ready = preempted is not None and self._planner.free_slots_of_preempted(preempted)
        waiting = None if self.is_draining else self._next_waiting(step)
        if self._claimant is not None and (
            preempted is None or self._precedes(self._claimant, preempted)
        ):
            return None  # what becomes free is kept for it
        if preempted is None or (waiting is not None and self._precedes(waiting, preempted)):
            return waiting
        return preempted if is_ready else None

    def _precedes(self, waiting: SequenceGroup, preempted: SequenceGroup) -> bool:
        """Whether a waiting group is admitted before a preempted one."""
        if not self._config.fair_queueing:
            return waiting.rank < preempted.rank
        if waiting.submit.priority != preempted.submit.priority:
            return waiting.submit.priority < preempted.submit.priority
        if self._has_nothing(waiting):
            return not self._has_nothing(preempted)
        return (
            self._shared.is_limited
            and self._shared.is_within_share(waiting)
            and not self._shared.is_within_share(preempted)
        )

    def _next_waiting(self, step: int) -> SequenceGroup | None:
        """The first waiting group, or one that may pass it, None if it lacks slots.

        Slots that become free are kept for a group that was passed for ``max_passing_steps``, and
        for one that displaces others.
        """
        first = self._queues.first_waiting()
        if first is None or first.num_slots <= self._planner.num_free_slots:
            return first
        if self._victim_for(first) is not None:
            self._claimant = first
            return None
        first.passed_since = first.passed_since or step
        if step - first.passed_since >= self._config.max_passing_steps:
            return None
        later = self._queues.first_waiting(self._planner.num_free_slots)
        same_priority = later is not None and later.submit.priority == first.submit.priority
        return later if same_priority else None

    # -------------------------------------------------------------- fairness

    def _has_nothing(self, group: SequenceGroup) -> bool:
        """Whether the tenant of a group that does not run has no running group either."""
        return self._queues.tenants.num_groups(group.submit.tenant) == 0

    def _displace(self, draft: PlanDraft) -> None:
        """Preempt one group for the waiting one that lacked slots or blocks in the step before."""
        claimant, self._claimant = self._claimant, None
        lacks_blocks, self._lacks_blocks = self._lacks_blocks, False
        if claimant is None or claimant.state is not WAITING:
            return
        # Slots of a preempted group are free when the results of its plans are applied.
        num_awaited = 0
        for group in self._queues.preempted:
            if not self._planner.free_slots_of_preempted(group) and group.search is None:
                num_awaited += group.num_slots
        lacks_slots = claimant.num_slots > self._planner.num_free_slots + num_awaited
        if (lacks_slots or lacks_blocks) and (victim := self._victim_for(claimant)) is not None:
            self._preempt(victim, claimant, draft)

    def _victim_for(self, group: SequenceGroup) -> SequenceGroup | None:
        """The last group of the tenant with most running sequences; None: none is displaced."""
        tenants = self._queues.tenants
        if not self._config.fair_queueing or group.state is not WAITING or group.computes_prefix:
            return None
        share = self._config.max_num_sequences // max(1, tenants.num_active)
        if group.num_slots > max(1, share) or not self._has_nothing(group):
            return None
        busiest = tenants.busiest()
        if busiest is None or tenants.num_groups(busiest) < 2:
            return None
        victim = self._last_of(busiest)
        if victim is None or _must_run_alone(victim):
            return None
        return victim if victim.submit.priority >= group.submit.priority else None

    def _shorten_step(self, draft: PlanDraft) -> None:
        """Preempt last groups of tenants beyond their share until the step is within its limit.

        Their blocks stay in the prefix cache; to swap them would make the step longer.
        """
        tenants = self._queues.tenants
        while self._shared.is_exceeded:
            busiest = tenants.busiest(least_groups=2)
            if busiest is None or not self._shared.is_beyond_share(busiest):
                return
            victim = self._last_of(busiest)
            if victim is None or not self._gives_way(victim):
                return
            beneficiary = self._queues.first_of_other_tenant(busiest) or victim
            self._planner.preempt(victim, beneficiary, Preemption.RECOMPUTE, draft)

    def _gives_way(self, group: SequenceGroup) -> bool:
        """Whether a group of a tenant beyond its share is not more urgent than other tenants'."""
        if group.computes_prefix:
            return False
        other = self._queues.first_of_other_tenant(group.submit.tenant)
        return other is None or other.submit.priority <= group.submit.priority

    def _last_of(self, tenant: str) -> SequenceGroup | None:
        """The last running group of a tenant, by rank, that does not end by itself soon."""
        for group in reversed(self._queues.running):
            is_of_tenant = group.submit.tenant == tenant and not group.computes_prefix
            if is_of_tenant and group.state is not FINISHING:
                return group
        return None


def _must_run_alone(group: SequenceGroup) -> bool:
    return group.num_deaths >= ALONE_AFTER_DEATHS
