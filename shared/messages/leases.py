"""What stands in keys with a time to live: WorkerInfo (by rank) and EngineInfo."""

from dataclasses import dataclass
from enum import StrEnum

from shared.codec import Message, message

PROTOCOL = 2
"""What the services of one engine must agree on.

Readers ignore fields that they do not know, so most changes need no other number. Where that would
not do, the number is raised: services of another one are refused by their leases, before an epoch
begins and before a request is taken.
"""


def why_incompatible(service: str, protocol: int) -> str | None:
    """None if a service that names this protocol in its lease can be worked with."""
    if protocol == PROTOCOL:
        return None
    return (
        f"the {service} speaks protocol {protocol}, this process {PROTOCOL}: "
        "all services of an engine must be of versions that go together"
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What gateways and scheduler must know of the model."""

    name: str  # as clients name it
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    dtype: str
    eos_token_ids: tuple[int, ...]
    takes_grammars: bool = False  # whether the worker limits texts to a request's grammar


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The device pool."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # K and V, all layers
    num_host_blocks: int  # of the host pool, for swapping


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Speeds:
    """What preemption costs on this machine, measured at start."""

    prefill_tokens_per_s: float
    swap_bytes_per_s: float  # between the two pools, either way


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
    life: str = ""  # shared by instances that followed each other though no plan had failed
    protocol: int = 1  # that of leases which name none


class EngineState(StrEnum):
    STARTING = "starting"  # no worker yet
    READY = "ready"
    FAILED = "failed"  # no worker can serve the model; what is open ends with an error


class PrefixState(StrEnum):
    PENDING = "pending"  # not all of its blocks are computed
    PINNED = "pinned"
    REFUSED = "refused"  # it cannot be pinned; the scheduler's log says why


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """What became of a Pin."""

    prefix_id: str
    state: str  # PrefixState
    num_blocks: int  # full ones; the rest of a prefix is not pinned


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
    max_num_sequences: int  # that run at once: a request cannot have more choices
    num_running: int
    num_waiting: int
    prefixes: tuple[PrefixStatus, ...] = ()  # those of this epoch that need no further Pin
    stalled_ms: int = 0  # how long there has been work without a step; 0: all is well
    draining: bool = False  # what is accepted is finished, nothing new is accepted
    protocol: int = 1  # that of leases which name none
