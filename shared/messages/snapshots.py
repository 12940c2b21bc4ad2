"""Messages of ``{E}:snapshots``, from the scheduler to readers that show an engine's state."""

from dataclasses import dataclass
from enum import IntEnum

from shared.codec import IntArray, Message, message


class RequestPhase(IntEnum):
    """The phase of a request that was accepted."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3  # its keys and values are lost
    SWAPPED = 4  # preempted; the host pool keeps them
    ENDED = 5


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request that has not ended, with its sequences that have not."""

    request_id: str
    tenant: str
    phase: int  # RequestPhase
    priority: int
    accepted_ms: int
    num_prompt_tokens: int
    max_output: int  # tokens that each sequence may generate
    num_generated: int  # by each sequence that has not ended
    search: int  # handle of the beam search in results; 0: it is none
    num_tokens: int  # of each sequence at its admission
    decode_from: int  # first step that computes a token behind these; 0: none was planned
    handles: IntArray  # [n]
    num_computed: IntArray  # [n] tokens with keys and values, while they are not decoding
    table_lengths: IntArray  # [n]
    block_tables: IntArray  # [sum of table_lengths] one after the other
    host_lengths: IntArray  # [n] blocks of the host pool, while the request is swapped out
    host_tables: IntArray  # [sum of host_lengths]


@message
@dataclass(frozen=True, slots=True, eq=False)
class PoolSnapshot(Message):
    """The state of pool and requests after a plan: a reader of the logs can begin here.

    Entry id ``<epoch>-<milliseconds since the epoch began>``. The state includes the plans up to
    ``step`` and the entries of ``outputs`` up to ``outputs_cursor``.
    """

    step: int
    outputs_cursor: str
    num_blocks: int
    block_size: int  # tokens
    num_host_blocks: int
    max_model_len: int  # tokens
    max_num_sequences: int
    max_num_batched_tokens: int
    num_watermark_blocks: int
    preemption: str
    num_waiting: int  # requests that were never admitted; not all of them need be in ``requests``
    requests: tuple[RequestSnapshot, ...]
    cached: IntArray  # [c] blocks without references that can be found in the prefix cache
    pinned: IntArray  # [p]
    settings: str = "{}"  # of the scheduler core, as a JSON map
