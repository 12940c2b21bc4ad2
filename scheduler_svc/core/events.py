"""Events of the scheduler core, for logs and metrics.

They are not frozen: there are several per request, and frozen ones take three times as long to
make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.blocks.block_pool import BlockPool
from scheduler_svc.core.sequences.sequence import SequenceGroup


@dataclass(slots=True)
class Accepted:
    """A request waits to be admitted."""

    request_id: str
    num_prompt_tokens: int
    recovered: bool  # taken over from an earlier epoch, in which it was accepted


@dataclass(slots=True)
class Refused:
    """A request was not accepted."""

    request_id: str
    reason: str


@dataclass(slots=True)
class Admitted:
    """A group got its blocks."""

    request_id: str
    again: bool  # it had been computed before
    num_tokens: int  # of all its sequences
    num_reused: int  # of those, found in the prefix cache or brought back from the host pool
    tenant: str


@dataclass(slots=True)
class Preempted:
    """A group lost its blocks, with keys and values of ``num_tokens`` tokens, to ``by``."""

    request_id: str
    by: str
    kind: str  # "recompute" or "swap"
    num_tokens: int


@dataclass(slots=True)
class Rewound:
    """A request continues from what its client has, which differs from the log."""

    request_id: str
    num_generated: int  # tokens of each choice


@dataclass(slots=True)
class FirstToken:
    """The first token of a request's choices was sampled."""

    request_id: str


@dataclass(slots=True)
class Ended:
    """A request has ended."""

    request_id: str
    reason: str
    num_generated: int
    tenant: str


@dataclass(slots=True)
class PrefixPinned:
    """All full blocks of a prefix are computed and stay in the pool."""

    prefix_id: str
    name: str
    num_tokens: int  # in those blocks


@dataclass(slots=True)
class PrefixRefused:
    """A prefix cannot be pinned."""

    prefix_id: str
    name: str
    reason: str


@dataclass(slots=True)
class PrefixGivenUp:
    """A prefix was unpinned for the request ``by``, which could not have run otherwise."""

    prefix_id: str
    name: str
    by: str
    num_blocks: int


Event = (
    Accepted
    | Refused
    | Admitted
    | Preempted
    | Rewound
    | FirstToken
    | Ended
    | PrefixPinned
    | PrefixRefused
    | PrefixGivenUp
)


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of queues and pool at one moment."""

    num_running: int
    num_waiting: int  # preempted ones included
    num_waiting_tokens: int  # of prompts, that are not in a plan yet
    num_swapped: int  # of these, with keys and values in the host pool
    num_used_blocks: int  # by requests
    num_pinned_prefixes: int
    num_pinned_blocks: int
    num_pinned_unused_blocks: int  # of these, used by no request
    num_cached_blocks: int  # free, but still findable
    num_shared_blocks: int  # that sharing saves
    num_kv_tokens: int  # with keys and values in used blocks


def collect(
    pool: BlockPool,
    block_size: int,
    running: Sequence[SequenceGroup],
    num_waiting: int,
    num_waiting_tokens: int,
    num_swapped: int,
    num_pinned_prefixes: int,
    step: int,
) -> Stats:
    """Collect the state; visits every running sequence and every pinned block once."""
    num_pinned_unused = pool.num_pinned_unused
    num_used = pool.num_used - num_pinned_unused
    num_references = 0
    unfilled: dict[int, int] = {}  # by the last block of each table, which several may share
    for group in running:
        for sequence in group.sequences:
            table = sequence.block_table
            if table:
                num_references += len(table)
                tokens = group.kv_tokens_at(step, sequence)
                unfilled[table[-1]] = len(table) * block_size - tokens
    return Stats(
        num_running=len(running),
        num_waiting=num_waiting,
        num_waiting_tokens=num_waiting_tokens,
        num_swapped=num_swapped,
        num_used_blocks=num_used,
        num_pinned_prefixes=num_pinned_prefixes,
        num_pinned_blocks=pool.num_pinned,
        num_pinned_unused_blocks=num_pinned_unused,
        num_cached_blocks=pool.num_cached,
        num_shared_blocks=num_references - num_used,
        num_kv_tokens=num_used * block_size - sum(unfilled.values()),
    )
