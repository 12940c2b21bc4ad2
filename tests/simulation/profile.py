"""What a run is like: drawn from its seed, so that runs differ in kind and not only in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

import numpy as np

from shared.messages import Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.simulation.model import BLOCK_SIZE
from tests.support.requests import sampling

_LARGE_SHARE = 0.03


class Fault(StrEnum):
    """What may go wrong at any command of a party, or at any moment."""

    CRASH = "crash"  # of the party
    PAUSE = "pause"  # of the party
    LOST_REPLY = "lost reply"  # of the command, which was carried out
    OUTAGE = "outage"  # of the server
    RESTART = "restart"  # of the server, nothing is lost
    TAIL_LOSS = "tail loss"  # of the server, which restarts without its last writes
    RIVAL = "rival"  # a second process of the same role is started
    MOVE = "move"  # a client's connection breaks


class Manner(StrEnum):
    """What a client does."""

    RESUME = "resume"  # when it loses its stream, it continues it after what it has
    REPEAT = "repeat"  # it asks for all of it again, under the same id
    ABORT = "abort"  # it leaves after a few tokens
    STOP = "stop"  # its gateway finds a stop string after a few tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """A request and how its client behaves.

    Attributes:
        at_s: when it is sent.
        after: tokens of a choice after which the client leaves, or the stop string is found.
    """

    submit: Submit
    manner: Manner
    at_s: float
    after: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """One run's circumstances."""

    wishes: Sequence[Wish]
    faults: Sequence[Fault] = tuple(Fault)
    fault_rate: float = 0.02  # of a fault at each command
    max_faults: int = 3
    quiet_after_s: float = 30.0  # no faults are begun later
    num_blocks: int = 40
    num_host_blocks: int = 0
    preemption: str = "auto"
    max_plans_in_flight: int = 2
    outputs_retention: int = 10_000
    max_num_sequences: int = 8
    max_num_batched_tokens: int = 16
    repeat_rate: float = 0.0  # of an append that arrives twice
    latency_s: float = 0.002
    end_share: float = 0.0  # of tokens that end their sequence
    is_slow: float = 0.0  # of clients that read slowly
    max_lost_writes: int = 30
    max_skew_ms: int = 0
    cache: bool = True
    apart_s: float = 0.0  # between the starts of worker, scheduler and gateways
    restarts_s: Sequence[float] = (0.0, 0.01, 0.3, 7.0)  # how long what has died is away
    pauses_s: Sequence[float] = (0.05, 1.0, 7.0, 12.0, 30.0)
    outages_s: Sequence[float] = (0.01, 0.5, 3.0, 12.0)
    settle_s: float = 1.0  # from the last client's end to the first look at what is left

    @staticmethod
    def draw(rng: Random) -> "Profile":
        """Any circumstances: mostly few short requests and few faults, where most bugs show."""
        return _large(rng) if rng.random() < _LARGE_SHARE else _small(rng)


def _large(rng: Random) -> Profile:
    num_blocks = rng.choice((8, 12, 20, 40))
    span_s = rng.choice((0.02, 0.2, 2.0, 8.0))
    wishes = [
        _wish(rng, number, num_blocks, (1, 3, 8, 14), span_s)
        for number in range(rng.choice((1, 2, 3, 5)))
    ]
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
        max_num_sequences=rng.choice((3, 8)),
        max_num_batched_tokens=rng.choice((8, 16)),
        repeat_rate=rng.choice((0.0, 0.0, 0.05)),
        latency_s=rng.choice((0.0005, 0.002, 0.02)),
        end_share=rng.choice((0.0, 0.0, 0.1)),
        is_slow=rng.choice((0.0, 0.0, 0.5)),
        max_lost_writes=rng.choice((3, 10, 40, 200)),
        max_skew_ms=rng.choice((0, 100, 20_000)),
        cache=rng.random() < 0.8,
    )


def _small(rng: Random) -> Profile:
    latency_s = rng.choice((0.0005, 0.002))
    # A run is over before anything is done for the sake of time alone, unless a fault sees to it.
    apart_s = 25 * latency_s
    num_blocks = rng.choice((3, 4, 8))
    wishes = [
        _wish(rng, number, num_blocks, (1, 2, 3, 4), 25 * latency_s, 3.5 * apart_s)
        for number in range(rng.choice((1, 1, 2, 3)))
    ]
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
        max_num_sequences=3,
        max_num_batched_tokens=8,
        repeat_rate=rng.choice((0.0, 0.0, 0.05)),
        latency_s=latency_s,
        end_share=rng.choice((0.0, 0.0, 0.2)),
        is_slow=rng.choice((0.0, 0.0, 0.5)),
        max_lost_writes=rng.choice((1, 3, 10, 40)),
        max_skew_ms=rng.choice((0, 100, 20_000)),
        cache=rng.random() < 0.8,
        apart_s=apart_s,
        restarts_s=(0.0, 5 * latency_s, 0.05),
        pauses_s=(2 * latency_s, 10 * latency_s, 0.1, 0.6),
        outages_s=(2 * latency_s, 0.05),
        settle_s=10 * latency_s,
    )


def _wish(
    rng: Random,
    number: int,
    num_blocks: int,
    lengths: Sequence[int],
    span_s: float,
    from_s: float = 0.0,
) -> Wish:
    shared = rng.choice((0, 0, 4, 5))
    prompt = [*range(1, 1 + shared), *(100 + number for _ in range(rng.randint(1, 6)))]
    num_choices = rng.choice((1, 1, 1, 2, 3))
    max_tokens = rng.choice(lengths)
    while blocks_needed(len(prompt), max_tokens, num_choices) > num_blocks:
        max_tokens, num_choices = (max_tokens // 2, num_choices) if max_tokens > 1 else (1, 1)
    manner = rng.choice((Manner.RESUME, Manner.RESUME, Manner.REPEAT, Manner.ABORT, Manner.STOP))
    beams = None
    if num_choices > 1 and rng.random() < 0.4:
        manner = rng.choice((Manner.RESUME, Manner.REPEAT))
        beams = BeamParams(num_choices, 1.0, rng.choice(tuple(EarlyStopping)))
    after = rng.randint(1, max_tokens)
    return Wish(
        request(f"r{number}", prompt, max_tokens, num_choices, beams),
        manner,
        from_s + rng.random() * span_s,
        after,
    )


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    num_choices: int = 1,
    beams: BeamParams | None = None,
) -> Submit:
    """A request that no gateway has seen yet."""
    return Submit(
        request_id=request_id,
        gateway="",
        attachment="",
        prompt=np.array(prompt, np.int32),
        sampling=sampling(max_tokens=max_tokens, beams=beams),
        received_ms=0,
        num_choices=num_choices,
        priority=0,
        cache_salt="",
    )


def blocks_needed(num_prompt: int, max_tokens: int, num_choices: int) -> int:
    """Blocks without which a request is refused."""
    each = -(-(num_prompt + max_tokens - 1) // BLOCK_SIZE)
    shared = (num_prompt - 1) // BLOCK_SIZE
    return shared + num_choices * (each - shared)
