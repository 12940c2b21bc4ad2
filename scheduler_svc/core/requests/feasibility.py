"""What can never run, and what is cheaper: decisions that need no state of the scheduler."""

from scheduler_svc.core.config import Preemption, SchedulerConfig
from shared.messages.requests import Submit


def why_never(config: SchedulerConfig, submit: Submit, max_output: int) -> str | None:
    """Why a request could not run even if it were alone, or None.

    Args:
        max_output: tokens that each choice may generate.
    """
    num_prompt, num_choices = len(submit.prompt), submit.num_choices
    if num_prompt == 0:
        return "the prompt is empty"
    if max_output < 1:
        return (
            f"the prompt has {num_prompt} tokens, the model's context is "
            f"{config.max_model_len} tokens"
        )
    if not 1 <= num_choices <= config.max_num_sequences:
        return (
            f"{num_choices} choices were asked for, "
            f"at most {config.max_num_sequences} sequences run at once"
        )
    # The last token is sampled but never computed: it needs no slot.
    each = config.blocks_for(num_prompt + max_output - 1)
    shared = (num_prompt - 1) // config.block_size
    needed = shared + num_choices * (each - shared)
    if needed > config.num_blocks:
        return (
            f"{num_prompt} prompt tokens and {num_choices} x {max_output} to generate need "
            f"{needed} KV blocks, the pool has {config.num_blocks}"
        )
    return None


def kind_of_preemption(
    config: SchedulerConfig, num_blocks: int, num_free_host_blocks: int
) -> Preemption:
    """How a group of so many blocks gives them up (PagedAttention, section 4.5).

    Swapping if it is wanted, possible, and, if there is a choice, cheaper.
    """
    if config.preemption == Preemption.RECOMPUTE or num_blocks > num_free_host_blocks:
        return Preemption.RECOMPUTE
    if config.preemption == Preemption.SWAP:
        return Preemption.SWAP
    swap_us = 2 * num_blocks * config.swap_us_per_block
    recompute_us = num_blocks * config.block_size * config.recompute_us_per_token
    return Preemption.SWAP if swap_us < recompute_us else Preemption.RECOMPUTE
