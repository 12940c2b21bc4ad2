"""A snapshot of pool and requests, from which readers of the logs can go on."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain

import numpy as np

from scheduler_svc.core.blocks.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    FINISHING,
    PREEMPTED,
    PREFILLING,
    WAITING,
    SequenceGroup,
)
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages.snapshots import PoolSnapshot, RequestPhase, RequestSnapshot

_MOST_WAITING = 1_000  # requests; those that arrived last are left out


def take_snapshot(
    config: SchedulerConfig,
    pool: BlockPool,
    groups: Iterable[SequenceGroup],
    num_waiting: int,
    step: int,
    applied_step: int,
    outputs_cursor: EntryId,
) -> PoolSnapshot:
    """The state after the plan of ``step``, with results up to ``applied_step``."""
    return PoolSnapshot(
        step=step,
        outputs_cursor=str(outputs_cursor),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.max_model_len,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_watermark_blocks=config.num_watermark_blocks,
        preemption=config.preemption,
        num_waiting=num_waiting,
        requests=tuple(_request(group, step, applied_step) for group in _shown(groups)),
        cached=_packed(pool.cached_blocks()),
        pinned=_packed(pool.pinned_blocks()),
        settings=json.dumps(asdict(config)),
    )


def _shown(groups: Iterable[SequenceGroup]) -> Iterator[SequenceGroup]:
    waiting: list[SequenceGroup] = []
    for group in groups:
        if group.state is not WAITING:
            yield group
        elif len(waiting) < _MOST_WAITING:
            waiting.append(group)
    yield from waiting


def _request(group: SequenceGroup, step: int, applied_step: int) -> RequestSnapshot:
    sequences = group.sequences
    decodes = group.state in (DECODING, FINISHING)
    return RequestSnapshot(
        request_id=group.request_id,
        tenant=group.submit.tenant,
        phase=_phase(group),
        priority=group.submit.priority,
        accepted_ms=group.accepted_ms,
        num_prompt_tokens=group.num_prompt_tokens,
        max_output=group.max_output,
        num_generated=_num_generated(group, applied_step),
        search=0 if group.search is None else group.handle,
        num_tokens=group.num_tokens,
        decode_from=group.decode_from if decodes else 0,
        handles=_packed(found.handle for found in sequences),
        num_computed=_packed(group.kv_tokens_at(step, found) for found in sequences),
        table_lengths=_packed(len(found.block_table) for found in sequences),
        block_tables=_packed(chain.from_iterable(found.block_table for found in sequences)),
        host_lengths=_packed(len(found.host_table) for found in sequences),
        host_tables=_packed(chain.from_iterable(found.host_table for found in sequences)),
    )


def _phase(group: SequenceGroup) -> RequestPhase:
    if group.state is WAITING:
        return RequestPhase.WAITING
    if group.state is PREEMPTED:
        return RequestPhase.SWAPPED if group.is_swapped else RequestPhase.PREEMPTED
    return RequestPhase.PREFILL if group.state is PREFILLING else RequestPhase.DECODE


def _num_generated(group: SequenceGroup, applied_step: int) -> int:
    """Of one sequence, as far as results are applied."""
    if group.state in (DECODING, FINISHING):
        num_sampled = min(applied_step, group.last_step) - group.decode_from + 2
        return group.num_tokens - group.num_prompt_tokens + max(0, num_sampled)
    if group.search is not None:
        return len(group.search.running[0].tokens()) if group.search.running else 0
    return len(group.sequences[0].output) if group.sequences else 0


def _packed(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, np.int32)
