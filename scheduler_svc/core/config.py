"""Settings of the scheduler core; fixed for an epoch."""

from dataclasses import dataclass
from enum import StrEnum

from shared.errors import PageStreamError


class ProtocolError(PageStreamError):
    """A result contradicts the plans: the epoch cannot be continued."""


class Preemption(StrEnum):
    """What happens to the blocks of a preempted group (PagedAttention, section 4.5)."""

    RECOMPUTE = "recompute"  # they are freed, and computed again
    SWAP = "swap"  # they are copied to the host pool, if it has room
    AUTO = "auto"  # whichever is cheaper for the group


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Geometry of the pool and limits of a step.

    The default of a field is the behaviour of schedulers before it existed: recordings without the
    field are replayed with it.
    """

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    max_num_sequences: int
    max_num_batched_tokens: int
    max_plans_in_flight: int
    num_watermark_blocks: int  # kept free on admission while others run
    outputs_retention: int  # entries of the outputs log kept for slow readers
    outputs_retention_bytes: int = 64 << 20  # limit of their size
    prefix_caching: bool = True  # blocks stay findable when no table refers to them any more
    num_host_blocks: int = 0
    preemption: str = Preemption.AUTO
    recompute_us_per_token: float = 1.0  # cost of a preemption, for AUTO
    swap_us_per_block: float = 1.0  # one way
    max_prompt_tokens: int = 0  # in a step in which others decode; 0: what the budget leaves
    enough_prompt_tokens: int = 0  # of several prompts if no others wait; 0: what the budget leaves
    max_pinned_blocks: int = 0  # that pinned prefixes may hold
    max_waiting_requests: int = 0  # that were never admitted; 0: no limit
    max_waiting_tokens: int = 0  # of their prompts
    max_tenant_requests: int = 0  # the same for each tenant
    max_tenant_tokens: int = 0
    fair_queueing: bool = False  # between tenants; else requests are served by arrival alone
    prompt_token_weight: float = 1.0  # what a computed prompt token costs its tenant
    generated_token_weight: float = 2.0  # and a generated one
    max_tenant_sequences: int = 0  # of one tenant that run at once; 0: no limit
    max_tenant_slowdown: float = 0.0  # of a step, by tenants with many sequences; 0: no limit
    step_overhead_tokens: float = 0.0  # that take as long as a step without any; 0: not known
    queue_ttl_ms: int = 0  # how long a request may wait to be admitted; 0: no limit
    max_passing_steps: int = 0  # for which later groups may pass one that lacks slots
    vocab_size: int = 0  # tokens of the model; 0: not checked
    tenants_share_prefixes: bool = True  # else they share pinned ones only
    resume_window_ms: int = 60_000  # how long an ended request is remembered

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_sequences={self.max_num_sequences}: every running sequence needs a "
                "token in each step"
            )
        if 2 * self.max_pinned_blocks > self.num_blocks:
            raise ValueError(
                f"max_pinned_blocks={self.max_pinned_blocks} is more than half of "
                f"num_blocks={self.num_blocks}: one prefix may not fit beside the others"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the keys and values of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)
