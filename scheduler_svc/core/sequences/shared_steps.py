"""Limits how long tenants with many sequences make the steps of those with few.

A step computes one token of every running sequence, so each sequence makes it longer for all. A
step of n tokens takes as long as ``step_overhead_tokens`` + n tokens would in a large batch. If
each of T tenants had as many requests as the one with the fewest, m, a step would have T·m tokens.
While tenants share the steps, these may take ``max_tenant_slowdown`` times as long as that.
"""

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.tenant_service import TenantService


class SharedSteps:
    """The tokens of a step, and each tenant's share of them, while several tenants have requests.

    A tenant beyond its share has what others leave of the limit. Its prompts may use what was left
    of earlier steps.

    Args:
        tenants: their requests and running groups.

    Attributes:
        is_limited: whether tenants share the step that is planned; set by ``begin``.
        prompt_budget: tokens of prompts for tenants beyond their share.
    """

    def __init__(self, config: SchedulerConfig, tenants: TenantService) -> None:
        self.is_limited = False
        self.prompt_budget = 0
        self._tenants = tenants
        self._slowdown = config.max_tenant_slowdown
        self._extra_tokens = (config.max_tenant_slowdown - 1) * config.step_overhead_tokens
        self._is_known = config.fair_queueing and config.max_tenant_slowdown > 0
        self._is_known &= config.step_overhead_tokens > 0
        self._most_saved = config.max_prompt_tokens or config.max_num_batched_tokens
        self._limit = 0  # tokens
        self._share = 0  # sequences of a tenant

    def begin(self) -> None:
        """Set the limits of the next step, by the tenants that have requests or had some lately."""
        was_limited, self.is_limited = self.is_limited, False
        if not self._is_known:
            return
        num_tenants, fewest = self._tenants.demand()
        if num_tenants < 2:
            return
        self.is_limited = True
        self._limit = int(self._extra_tokens + self._slowdown * num_tenants * fewest)
        self._share = max(1, self._limit // num_tenants)
        if not was_limited:
            self.prompt_budget = 0

    def save(self, num_decoding: int) -> None:
        """Add what decoding sequences leave of the step to the prompt budget, which is bounded."""
        if self.is_limited:
            left = max(1, self._limit - num_decoding)
            self.prompt_budget = min(self.prompt_budget + left, self._most_saved)

    @property
    def is_exceeded(self) -> bool:
        """Whether more sequences run than the step should have tokens."""
        return self.is_limited and self._tenants.num_running > self._limit

    def is_beyond_share(self, tenant: str) -> bool:
        """Whether a tenant runs more sequences than its share."""
        return self.is_limited and self._tenants.num_sequences(tenant) > self._share

    def would_exceed(self, group: SequenceGroup) -> bool:
        """Whether a group that does not run has to wait until the limit has room.

        A tenant may always run its share, and one group however many sequences that has.
        """
        if not self.is_limited or self.is_within_share(group):
            return False
        return self.prompt_budget <= 0 or self._tenants.num_running + group.num_slots > self._limit

    def is_within_share(self, group: SequenceGroup) -> bool:
        """Whether the tenant of a group that does not run stays within its share with it."""
        num_sequences = self._tenants.num_sequences(group.submit.tenant)
        return num_sequences == 0 or num_sequences + group.num_slots <= self._share
