"""Sequence groups: the sequences of a request, and the states of a group."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from scheduler_svc.core.blocks.block_pool import BlockHash
from scheduler_svc.core.blocks.prefix_hashes import Chain
from scheduler_svc.core.requests.ended_requests import EndedChoice
from scheduler_svc.core.sequences.beam_search import BeamSearch
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages.requests import Submit


class GroupState(Enum):
    """State of a sequence group. Its sequences are scheduled together (gang scheduling)."""

    WAITING = auto()  # not admitted yet, in this epoch
    PREFILLING = auto()  # has blocks; some of its tokens are not in a plan yet
    DECODING = auto()  # computes one token per sequence in every step; plans do not list it
    SEARCHING = auto()  # computes its beams' last tokens, or is about to; plans list them
    FINISHING = auto()  # its last possible token is planned; its results are in flight
    PREEMPTED = auto()  # lost its blocks, waits to be admitted again
    ENDED = auto()

    __hash__ = object.__hash__  # members are singletons; Enum would hash their names each time


# Every step compares them many times, and as attributes of the Enum they take ten times as long.
WAITING: Final = GroupState.WAITING
PREFILLING: Final = GroupState.PREFILLING
DECODING: Final = GroupState.DECODING
SEARCHING: Final = GroupState.SEARCHING
FINISHING: Final = GroupState.FINISHING
PREEMPTED: Final = GroupState.PREEMPTED
ENDED: Final = GroupState.ENDED
_TRANSITIONS: Final = {
    WAITING: {PREFILLING, ENDED},
    PREFILLING: {
        WAITING,  # only groups that compute prefixes
        DECODING,
        SEARCHING,
        FINISHING,
        PREEMPTED,
        ENDED,
    },
    DECODING: {FINISHING, PREEMPTED, ENDED},
    SEARCHING: {PREEMPTED, ENDED},
    FINISHING: {PREEMPTED, ENDED},  # preempted if the client's view differs from the log
    PREEMPTED: {PREFILLING, ENDED},
    ENDED: set(),
}

NO_TOKENS: Final[IntArray] = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request, or one beam."""

    choice: int
    handle: int
    output: IntArray  # generated tokens, as of when the sequence was last without a slot
    slot: int | None = None  # one of ``max_num_sequences``, a row of the token store
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # of the host pool, while swapped out
    hashes: list[BlockHash] = field(default_factory=list)  # of the leading full blocks
    num_planned: int = 0  # tokens that are cached or in a plan, while it prefills
    is_resident: bool = False  # the worker has it in its batch, or gets it by a plan in flight


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request. Its sequences that have not ended are equally long.

    Times are step numbers. A decoding sequence grows by one token in every step, so its length at
    any step follows from ``decode_from`` and is not stored.
    """

    submit: Submit
    arrival: int  # order of acceptance
    accepted_ms: int  # time of acceptance, by the engine's clock; 0: not known
    max_output: int  # generated tokens at most: the request's limit or the context's end
    sequences: list[Sequence]  # those that have not ended; of a beam search, by running beam
    ended: dict[int, EndedChoice] = field(default_factory=dict)  # by choice
    prefilled: list[Sequence] = field(default_factory=list)  # those to compute; others fork
    state: GroupState = WAITING
    num_tokens: int = 0  # prompt and output of each sequence at its admission
    decode_from: int = 0  # first step that computes a token behind these
    next_block_step: int = 0  # step whose tokens need a new block
    last_step: int = 0  # step that reaches max_output; if preempted: last step that had it
    state_id: EntryId | None = None  # entry of its latest RequestState with the prompt
    was_admitted: bool = False
    num_deaths: int = 0  # workers in a row that died while they computed it
    computes_prefix: bool = False  # computes a pinned prefix, for no client
    passed_since: int = 0  # first step in which it was first but lacked slots; 0: none
    chain: Chain | None = None  # hashes of its blocks, once it has tried to get any
    search: BeamSearch | None = None
    handle: int = 0  # of the beam search, in results
    parents: list[int] = field(default_factory=list)  # handles that the beams continue
    awaited_step: int = 0  # whose result the beam search needs next; 0: it has all
    rank: tuple[int, int] = field(init=False)  # lower is served earlier, and preempted later

    def __post_init__(self) -> None:
        self.rank = (self.submit.priority, self.arrival)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.submit.request_id

    @property
    def num_slots(self) -> int:
        """Slots that it needs: the most sequences that it can have."""
        return len(self.sequences) if self.search is None else self.search.params.width

    @property
    def is_swapped(self) -> bool:
        """Whether the host pool keeps its keys and values."""
        return bool(self.sequences and self.sequences[0].host_table)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt)

    def move_to(self, state: GroupState) -> None:
        """Change state."""
        assert state in _TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def tokens_of(self, sequence: Sequence) -> IntArray:
        """Prompt and output of a sequence without a slot."""
        return np.concatenate([self.submit.prompt, sequence.output])

    def prepare_prefill(self) -> None:
        """Set how long the sequences are, and which of them must be computed."""
        self.store_beam_outputs()
        num_output = len(self.sequences[0].output)
        self.num_tokens = self.num_prompt_tokens + num_output
        # While nothing is generated all sequences are equal: the first is computed, the others
        # fork from it.
        self.prefilled = list(self.sequences) if num_output else self.sequences[:1]

    def store_beam_outputs(self) -> None:
        """Store what each running beam has generated as its sequence's output."""
        if self.search is not None:
            for sequence, beam in zip(self.sequences, self.search.running, strict=True):
                sequence.output = beam.tokens()

    def next_position(self, step: int) -> int:
        """Position at which the sequences of a running group write in this step."""
        if self.state is SEARCHING:
            return self.num_tokens - 1
        return self.num_tokens + step - self.decode_from

    def kv_tokens_at(self, step: int, sequence: Sequence) -> int:
        """Number of a sequence's tokens with keys and values after ``step``."""
        if self.state in (DECODING, FINISHING):
            return self.num_tokens + min(step, self.last_step) - self.decode_from + 1
        if self.state is SEARCHING:
            return self.num_tokens - (self.awaited_step == 0)
        return sequence.num_planned if sequence.block_table else 0
