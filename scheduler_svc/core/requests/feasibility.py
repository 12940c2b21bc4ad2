"""Requests that could not run even alone."""

from scheduler_svc.core.config import SchedulerConfig
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
    if 0 < config.max_tenant_sequences < num_choices:
        return (
            f"{num_choices} choices were asked for, "
            f"at most {config.max_tenant_sequences} sequences of one key run at once"
        )
    # The last token is sampled but never computed: it needs no place in a block.
    each = config.blocks_for(num_prompt + max_output - 1)
    shared = (num_prompt - 1) // config.block_size
    needed = shared + num_choices * (each - shared)
    if needed > config.num_blocks:
        return (
            f"{num_prompt} prompt tokens and {num_choices} x {max_output} to generate need "
            f"{needed} KV blocks, the pool has {config.num_blocks}"
        )
    return None
