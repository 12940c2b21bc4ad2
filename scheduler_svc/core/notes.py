"""What the core tells the service for logs and metrics; it decides nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence got its blocks. ``num_recomputed`` tokens had been computed before."""

    request_id: str
    again: bool
    num_recomputed: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """``by`` needed a block; ``num_tokens`` tokens of keys and values were given up."""

    request_id: str
    by: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    request_id: str
    reason: str
    num_generated: int


Note = Accepted | Refused | Admitted | Preempted | FirstToken | Ended


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of queues and pool at one moment."""

    num_running: int
    num_waiting: int  # preempted ones included
    num_used_blocks: int
    num_kv_tokens: int
