"""What a run is like: drawn from its seed, so that runs differ in kind and not only in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gateway.pins.pin_requests import Prefix
from shared.messages.requests import Submit
from shared.sampling import BeamParams
from tests.support.requests import sampling

WALL_S = 1_700_000_000  # time of day when a run begins


class Fault(StrEnum):
    """What may go wrong at any command of a party, or at any moment."""

    CRASH = "crash"  # of the party
    PAUSE = "pause"  # of the party
    LOST_REPLY = "lost reply"  # of the command, which was carried out
    OUTAGE = "outage"  # of the server
    RESTART = "restart"  # of the server, nothing is lost
    TAIL_LOSS = "tail loss"  # of the server, which restarts without its last writes
    DELETION = "deletion"  # of one log, or of all that the server has; it goes on running
    RIVAL = "rival"  # a second process of the same role is started
    MOVE = "move"  # a client's connection breaks
    LEAVE = "leave"  # a scheduler or worker is asked to end


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
        joins: another client has asked for the same, under the same Idempotency-Key.
    """

    submit: Submit
    manner: Manner
    at_s: float
    after: int = 0
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """One run's circumstances."""

    wishes: Sequence[Wish]
    faults: Sequence[Fault] = tuple(Fault)
    fault_rate: float = 0.02  # of a fault at each command
    max_faults: int = 3
    faults_from_s: float = 0.0  # no faults are begun earlier
    quiet_after_s: float = 30.0  # nor later
    num_ranks: int = 1
    num_blocks: int = 40
    num_host_blocks: int = 0
    preemption: str = "auto"
    max_plans_in_flight: int = 2
    outputs_retention: int = 10_000
    outputs_retention_bytes: int = 64 << 20
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
    swap_bytes_per_s: float = 1e9
    drain_timeout_s: float = 0.0
    max_waiting_requests: int = 0
    max_tenant_requests: int = 0
    max_tenant_tokens: int = 0
    queue_ttl_s: float = 0.0
    prefixes: Sequence[Prefix] = ()  # pinned ones
    settle_s: float = 1.0  # from the last client's end to the first look at what is left

    @property
    def has_short_log(self) -> bool:
        """What has ended may be trimmed while the run goes on."""
        return self.outputs_retention < 1_000 or self.outputs_retention_bytes < 1 << 20

    @property
    def has_bounds(self) -> bool:
        """Requests may be refused because others wait."""
        bounds = (self.max_waiting_requests, self.max_tenant_requests, self.max_tenant_tokens)
        return any(bounds)


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    num_choices: int = 1,
    beams: BeamParams | None = None,
    num_logprobs: int | None = None,
) -> Submit:
    """A request that no gateway has seen yet."""
    return Submit(
        request_id=request_id,
        gateway="",
        attachment="",
        prompt=np.array(prompt, np.int32),
        sampling=sampling(max_tokens=max_tokens, beams=beams, num_logprobs=num_logprobs),
        received_ms=0,
        num_choices=num_choices,
        priority=0,
        cache_salt="",
    )
