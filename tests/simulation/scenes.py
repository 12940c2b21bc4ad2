"""Circumstances drawn from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from gateway.pins.pin_requests import Prefix
from shared.sampling import BeamParams, EarlyStopping
from tests.simulation.deployment.model import BLOCK_SIZE
from tests.simulation.profile import WALL_S, Fault, Manner, Profile, Wish, request

LARGE_SHARE = 0.03


def draw(rng: Random) -> Profile:
    """Any circumstances: mostly few short requests and few faults, where most bugs show."""
    return large(rng) if rng.random() < LARGE_SHARE else small(rng)


def large(rng: Random) -> Profile:
    """Up to five requests, some of them longer, and faults that take their time."""
    num_blocks = rng.choice((8, 12, 20, 40))
    span_s = rng.choice((0.02, 0.2, 2.0, 8.0))
    wishes: list[Wish] = []
    for number in range(rng.choice((1, 2, 3, 5))):
        wishes += _wishes(rng, number, num_blocks, (1, 3, 8, 14), span_s, 0.0, (0.3, 10.0))
    # Few kinds at a time come together in more ways than all kinds at once.
    faults = rng.sample(tuple(Fault), rng.choice((1, 2, 3, len(Fault))))
    return Profile(
        wishes=wishes,
        faults=faults,
        fault_rate=rng.choice((0.005, 0.02, 0.05)),
        max_faults=rng.choice((0, 1, 2, 3, 5)),
        num_blocks=num_blocks,
        num_host_blocks=rng.choice((0, 0, 4, 16)),
        preemption=rng.choice(("recompute", "swap", "auto")),
        max_plans_in_flight=rng.choice((1, 2, 2, 4)),
        outputs_retention=rng.choice((3, 6, 12, 10_000)),
        outputs_retention_bytes=rng.choice((1_500, 6_000, 64 << 20, 64 << 20)),
        max_num_sequences=rng.choice((3, 8)),
        max_num_batched_tokens=rng.choice((8, 16)),
        repeat_rate=rng.choice((0.0, 0.0, 0.05)),
        latency_s=rng.choice((0.0005, 0.002, 0.02)),
        end_share=rng.choice((0.0, 0.0, 0.1)),
        is_slow=rng.choice((0.0, 0.0, 0.5)),
        max_lost_writes=rng.choice((3, 10, 40, 200)),
        max_skew_ms=rng.choice((0, 100, 20_000)),
        cache=rng.random() < 0.8,
        **_limits(rng, 1.0, num_blocks),
    )


def small(rng: Random) -> Profile:
    """Some tokens, and faults at once one after the other."""
    latency_s = rng.choice((0.0005, 0.002))
    # A run is over before anything is done for the sake of time alone, unless a fault sees to it.
    apart_s = 25 * latency_s
    num_blocks = rng.choice((3, 4, 8))
    deadlines_s = (5 * latency_s, 20 * latency_s, 60 * latency_s)
    # Where several grow from block to block in a small pool, some have to make room.
    lengths: tuple[int, ...] = (1, 2, 3, 4)
    counts: tuple[int, ...] = (1, 1, 2, 3)
    if rng.random() < 0.2:
        num_blocks, lengths, counts = 4, (6, 8), (2, 3)
    wishes: list[Wish] = []
    for number in range(rng.choice(counts)):
        wishes += _wishes(rng, number, num_blocks, lengths, apart_s, 3.5 * apart_s, deadlines_s)
    faults = rng.sample(tuple(Fault), rng.choice((1, 2)))
    return Profile(
        wishes=wishes,
        faults=faults,
        fault_rate=rng.choice((0.003, 0.01, 0.03)),
        max_faults=rng.choice((1, 1, 2, 3)),
        num_blocks=num_blocks,
        num_host_blocks=rng.choice((0, 4)),
        preemption=rng.choice(("recompute", "swap", "auto")),
        max_plans_in_flight=rng.choice((1, 2, 2, 4)),
        outputs_retention=rng.choice((2, 3, 6, 10_000)),
        outputs_retention_bytes=rng.choice((1_000, 3_000, 64 << 20, 64 << 20)),
        max_num_sequences=3,
        max_num_batched_tokens=8,
        repeat_rate=rng.choice((0.0, 0.0, 0.05)),
        latency_s=latency_s,
        end_share=rng.choice((0.0, 0.0, 0.2)),
        is_slow=rng.choice((0.0, 0.0, 0.5)),
        max_lost_writes=rng.choice((1, 3, 10, 40)),
        max_skew_ms=rng.choice((0, 100, 20_000)),
        cache=rng.random() < 0.8,
        **_limits(rng, 20 * latency_s, num_blocks),
        apart_s=apart_s,
        faults_from_s=rng.choice((0.0, 3.5 * apart_s)),
        restarts_s=(0.0, 5 * latency_s, 0.05),
        pauses_s=(2 * latency_s, 10 * latency_s, 0.1, 0.6),
        outages_s=(2 * latency_s, 0.05),
        settle_s=10 * latency_s,
    )


def _limits(rng: Random, time_s: float, num_blocks: int) -> dict[str, Any]:
    """What ends or refuses requests, which most runs do without: a time that matters is given."""
    limits: dict[str, Any] = {
        "swap_bytes_per_s": rng.choice((1e9, 1e2)),
        "drain_timeout_s": rng.choice((0.0, time_s, 5 * time_s)),
    }
    if rng.random() < 0.15:
        limits["max_waiting_requests"] = rng.choice((0, 1, 2))
        limits["max_tenant_requests"] = rng.choice((0, 1))
        limits["max_tenant_tokens"] = rng.choice((0, 8))
    if rng.random() < 0.1:
        limits["queue_ttl_s"] = rng.choice((0.2, 1.0, 3.0)) * time_s
    if rng.random() < 0.1 and num_blocks > 3:
        limits["prefixes"] = (Prefix("beginning", np.arange(1, 5, dtype=np.int32), ""),)
    return limits


def _wishes(
    rng: Random,
    number: int,
    num_blocks: int,
    lengths: Sequence[int],
    span_s: float,
    from_s: float,
    deadlines_s: Sequence[float],
) -> list[Wish]:
    """What one client wants, and sometimes another one with it."""
    shared = rng.choice((0, 0, 4, 5))
    prompt = [*range(1, 1 + shared), *(100 + number for _ in range(rng.randint(1, 6)))]
    num_choices = rng.choice((1, 1, 1, 2, 3))
    max_tokens = rng.choice(lengths)
    while blocks_needed(len(prompt), max_tokens, num_choices) > num_blocks:
        max_tokens, num_choices = (max_tokens // 2, num_choices) if max_tokens > 1 else (1, 1)
    manner = rng.choice((Manner.RESUME, Manner.RESUME, Manner.REPEAT, Manner.ABORT, Manner.STOP))
    beams, num_logprobs = None, None
    if num_choices > 1 and rng.random() < 0.4:
        manner = rng.choice((Manner.RESUME, Manner.REPEAT))
        beams = BeamParams(num_choices, 1.0, rng.choice(tuple(EarlyStopping)))
    elif rng.random() < 0.15:
        num_logprobs = 0
    at_s = from_s + rng.random() * span_s
    has_deadline = rng.random() < 0.1
    submit = replace(
        request(f"r{number}", prompt, max_tokens, num_choices, beams, num_logprobs),
        received_ms=int(1000 * (WALL_S + at_s)),
        tenant=rng.choice(("one", "two")),
        deadline_ms=int(1000 * (WALL_S + at_s + rng.choice(deadlines_s))) if has_deadline else 0,
    )
    wish = Wish(submit, manner, at_s, rng.randint(1, max_tokens))
    if manner is Manner.RESUME and rng.random() < 0.1:
        return [wish, replace(wish, at_s=at_s + rng.random() * span_s, joins=True)]
    return [wish]


def blocks_needed(num_prompt: int, max_tokens: int, num_choices: int) -> int:
    """Blocks without which a request is refused."""
    each = -(-(num_prompt + max_tokens - 1) // BLOCK_SIZE)
    shared = (num_prompt - 1) // BLOCK_SIZE
    return shared + num_choices * (each - shared)
