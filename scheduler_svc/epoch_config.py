"""Configuration of the scheduler core for one epoch, from the settings and the workers' leases."""

import dataclasses

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_watch import WorkerGroup
from shared.messages.leases import Speeds

_LEAST_PROMPT_TOKENS = 16  # in a step in which others decode, however slow the worker is
# Seconds of prompts beside which the fixed costs of a step, some 3 ms, are small; and the least
# tokens, since with fewer a slow worker waits for its memory.
_ENOUGH_S = 0.03
_LEAST_ENOUGH_TOKENS = 64


def config_for(settings: SchedulerSettings, workers: WorkerGroup) -> SchedulerConfig:
    """Limits of an epoch with these workers."""
    config = SchedulerConfig(
        num_blocks=workers.kv.num_blocks,
        block_size=workers.kv.block_size,
        max_model_len=workers.model.max_model_len,
        vocab_size=workers.model.vocab_size,
        max_passing_steps=settings.max_passing_steps,
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_plans_in_flight=settings.max_plans_in_flight,
        num_watermark_blocks=int(settings.watermark * workers.kv.num_blocks),
        outputs_retention=settings.outputs_retention,
        outputs_retention_bytes=settings.outputs_retention_bytes,
        prefix_caching=settings.prefix_caching,
        tenants_share_prefixes=settings.prefix_sharing == "all",
        num_host_blocks=workers.kv.num_host_blocks,
        preemption=settings.preemption,
        max_pinned_blocks=int(settings.max_pinned_share * workers.kv.num_blocks),
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_tenant_requests=settings.max_tenant_requests,
        max_tenant_tokens=settings.max_tenant_tokens,
        fair_queueing=settings.fair_queueing,
        prompt_token_weight=settings.prompt_token_weight,
        generated_token_weight=settings.generated_token_weight,
        max_tenant_sequences=settings.max_tenant_sequences,
        max_tenant_slowdown=settings.max_tenant_slowdown,
        queue_ttl_ms=int(1e3 * settings.queue_ttl),
        resume_window_ms=int(1e3 * settings.resume_window),
    )
    return _with_speeds(config, workers, settings.prefill_pause)


def longest_step_s(config: SchedulerConfig) -> float:
    """What a step of nothing but prompts takes, by the speed that the worker has measured."""
    return config.max_num_batched_tokens * config.recompute_us_per_token / 1e6


def _with_speeds(
    config: SchedulerConfig, workers: WorkerGroup, prefill_pause_s: float
) -> SchedulerConfig:
    """With what preemption costs on these workers, and prompts, if they have measured that."""
    if workers.speeds is None:
        return config
    tokens_per_s = workers.speeds.prefill_tokens_per_s
    num_tokens = max(_LEAST_PROMPT_TOKENS, int(prefill_pause_s * tokens_per_s))
    return dataclasses.replace(
        config,
        max_prompt_tokens=num_tokens if prefill_pause_s else 0,
        enough_prompt_tokens=max(_LEAST_ENOUGH_TOKENS, int(_ENOUGH_S * tokens_per_s)),
        recompute_us_per_token=1e6 / tokens_per_s,
        step_overhead_tokens=_overhead_tokens(workers.speeds),
        swap_us_per_block=1e6 * workers.kv.bytes_per_block / workers.speeds.swap_bytes_per_s,
    )


def _overhead_tokens(speeds: Speeds) -> float:
    """Decoded tokens that take as long as a step does without any; 0: not measured."""
    if not speeds.decode_token_s:
        return 0.0
    return speeds.step_overhead_s / speeds.decode_token_s
