"""Warm-up plans: a worker makes and executes them before it serves."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.codec import IntArray
from shared.messages.plans import Admission, StepPlan
from shared.sampling import SamplingParams

_NONE = np.empty(0, np.int32)


def prefill_plan(prompts: Sequence[IntArray], num_blocks: int, max_tokens: int = 2) -> StepPlan:
    """The plan of step 1: each prompt as one chunk, each in ``num_blocks`` blocks of the pool.

    Args:
        max_tokens: after which the sequences end, greedy ones.
    """
    sampling = SamplingParams.greedy(max_tokens)
    handles = np.arange(1, len(prompts) + 1, dtype=np.int32)
    tables = np.arange(len(prompts) * num_blocks, dtype=np.int32).reshape(len(prompts), num_blocks)
    admissions = tuple(
        Admission(
            handle=int(handle),
            choice=0,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            num_computed=0,
            block_table=table,
            sampling=sampling,
        )
        for handle, tokens, table in zip(handles, prompts, tables, strict=True)
    )
    sizes = np.array([len(tokens) for tokens in prompts], np.int32)
    return replace(decode_plan(1), admissions=admissions, chunk_handles=handles, chunk_tokens=sizes)


def decode_plan(step: int) -> StepPlan:
    """A plan in which every sequence decodes one token into its present blocks."""
    return StepPlan(
        step=step,
        now_ms=0,
        requests_cursor="0-0",
        outputs_cursor="0-0",
        outputs_min_id="0-0",
        retired=_NONE,
        beams=(),
        swap_out_device=_NONE,
        swap_out_host=_NONE,
        swap_in_host=_NONE,
        swap_in_device=_NONE,
        copy_sources=_NONE,
        copy_targets=_NONE,
        replaced_handles=_NONE,
        replaced_columns=_NONE,
        admissions=(),
        fork_parents=_NONE,
        fork_children=_NONE,
        fork_choices=_NONE,
        grown_handles=_NONE,
        grown_blocks=_NONE,
        chunk_handles=_NONE,
        chunk_tokens=_NONE,
    )
