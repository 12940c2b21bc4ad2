"""Leases, which are messages in keys that expire: WorkerInfo (one per rank) and EngineInfo."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from shared.codec import Message, decode_as, field_of, message
from shared.errors import DecodeError

_L = TypeVar("_L", bound="WorkerInfo | EngineInfo")

PROTOCOL = 3
"""Number of the protocol, which is equal in all services of an engine.

Readers ignore unknown fields, so most changes keep the number. A change that does not work with
older services raises it. A lease with another number is refused: the scheduler starts no epoch with
such a worker, and a gateway sends no request to such a scheduler.
"""


def why_incompatible(service: str, protocol: int) -> str | None:
    """An error if the lease of a service has another protocol than this process, else None."""
    if protocol == PROTOCOL:
        return None
    return (
        f"the {service} speaks protocol {protocol}, this process {PROTOCOL}: "
        "all services of an engine must be of versions that go together"
    )


def decode_lease(cls: type[_L], data: bytes, service: str) -> _L:
    """The lease of a service, for messages named ``service``.

    Its protocol is read first: that of another one may have fields that cannot be decoded.

    Raises:
        DecodeError: it has another protocol, or cannot be read.
    """
    protocol: Any = field_of(data, "protocol")
    if isinstance(protocol, int) and (why := why_incompatible(service, protocol)) is not None:
        raise DecodeError(why)
    try:
        lease: _L = decode_as(cls, data)
    except DecodeError as error:
        raise DecodeError(f"the lease of the {service} cannot be read: {error}") from None
    if (why := why_incompatible(service, lease.protocol)) is not None:
        raise DecodeError(why)
    return lease


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of the model that gateways and scheduler need."""

    name: str  # that clients give
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    dtype: str
    eos_token_ids: tuple[int, ...]
    takes_grammars: bool = False  # whether the worker can enforce a request's grammar
    weights: str = ""  # their format if they are quantized; "none": they have the dtype
    root: str = ""  # what it was loaded from: an absolute path, or a hub id; "": not in this lease


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes of the device pool and the host pool."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # K and V, all layers
    num_host_blocks: int  # of the host pool, for swapping
    dtype: str = ""  # of keys and values, as --kv-dtype names it; "": not in this lease


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds on which scheduling depends, measured at start.

    A step of a few decoding sequences takes ``step_overhead_s`` and ``decode_token_s`` for each.
    """

    prefill_tokens_per_s: float
    swap_bytes_per_s: float  # between the two pools, either way
    step_overhead_s: float = 0.0
    decode_token_s: float = 0.0  # 0: not measured


@message
@dataclass(frozen=True, slots=True, eq=False)
class WorkerInfo(Message):
    """A worker's lease; renewed by the loop that executes plans."""

    instance: str
    rank: int
    state: str  # WorkerState
    detail: str  # why it failed
    model: ModelInfo | None
    kv: KVGeometry | None
    speeds: Speeds | None
    life: str = ""  # equal in successive instances of a process in which no plan failed
    protocol: int = 1  # of leases without this field
    num_ranks: int = 1  # workers of the engine, which hold a part of the model each
    group: str = ""  # of ranks, which this worker has joined; rank 0 draws the name
    address: str = ""  # of the group's store, HOST:PORT; in the lease of rank 0
    parent: str = ""  # of the process; it has one worker at a time


class EngineState(StrEnum):
    STARTING = "starting"  # no worker yet
    READY = "ready"
    FAILED = "failed"  # no worker can serve the model; open requests end with an error


class PrefixState(StrEnum):
    PENDING = "pending"  # not all of its blocks are computed
    PINNED = "pinned"
    REFUSED = "refused"  # it cannot be pinned; the scheduler's log has the reason


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """The state of a pinned prefix."""

    prefix_id: str
    state: str  # PrefixState
    num_blocks: int  # full blocks; the rest of a prefix is not pinned


@message
@dataclass(frozen=True, slots=True, eq=False)
class EngineInfo(Message):
    """An engine's lease; renewed by the scheduler's loop."""

    engine_id: str
    scheduler: str
    epoch: int
    state: str  # EngineState
    detail: str
    model: ModelInfo | None
    kv: KVGeometry | None
    max_num_sequences: int  # sequences that run at once; a request cannot have more choices
    num_running: int
    num_waiting: int
    prefixes: tuple[PrefixStatus, ...] = ()  # whose Pin this epoch has read
    stalled_ms: int = 0  # how long there has been work without a step; 0: not stalled
    draining: bool = False  # accepted requests are finished, new ones are not accepted
    protocol: int = 1  # of leases without this field
    num_waiting_tokens: int = 0  # of prompts, that are not in a plan yet
    redis_url: str = ""  # of the Redis that has the engine's logs; only in a fleet's directory
