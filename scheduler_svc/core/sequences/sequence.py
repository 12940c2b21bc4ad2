"""A request's sequences: what the scheduler remembers of them, and the states they go through."""

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
    """Where a sequence group is in its life. Its sequences are scheduled as one (gang)."""

    WAITING = auto()  # never planned yet, in this epoch
    PREFILLING = auto()  # has blocks; some of its tokens are not in a plan yet
    DECODING = auto()  # computes one token per sequence in every plan without being named
    SEARCHING = auto()  # computes its beams' last tokens, or is about to: each plan names them
    FINISHING = auto()  # its last possible token is planned; results are still to come
    PREEMPTED = auto()  # lost its blocks, waits to get them back
    ENDED = auto()

    __hash__ = object.__hash__  # members are singletons; Enum would hash their names each time


# Every step asks for them many times, and as attributes of the Enum they take ten times as long.
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
        WAITING,  # only what nobody waits for
        DECODING,
        SEARCHING,
        FINISHING,
        PREEMPTED,
        ENDED,
    },
    DECODING: {FINISHING, PREEMPTED, ENDED},
    SEARCHING: {PREEMPTED, ENDED},
    FINISHING: {PREEMPTED, ENDED},  # the former if a client has seen something else
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
    slot: int | None = None  # row of the token store
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # of the host pool, while swapped out
    hashes: list[BlockHash] = field(default_factory=list)  # of the leading full blocks
    num_planned: int = 0  # tokens that are in a plan, while it prefills
    is_resident: bool = False  # the worker knows it, or will from a plan that is on its way


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request. Those of its sequences that have not ended are always equally long.

    Times are step numbers: in every step a decoding sequence grows by one token, so its length at
    any step follows from ``decode_from`` and needs no bookkeeping.
    """

    submit: Submit
    arrival: int  # order of acceptance
    accepted_ms: int  # when, by the engine's clock; 0: not known
    max_output: int  # generated tokens at most: the request's limit or the context's end
    sequences: list[Sequence]  # those that have not ended; of a beam search, by running beam
    ended: dict[int, EndedChoice] = field(default_factory=dict)  # by choice
    prefilled: list[Sequence] = field(default_factory=list)  # those whose prefill makes the group
    state: GroupState = WAITING
    num_tokens: int = 0  # prompt and output of each sequence when they were admitted
    decode_from: int = 0  # first step that computes a token behind those
    next_block_step: int = 0  # step whose token opens a new block
    last_step: int = 0  # step that reaches max_output; if preempted: last that included it
    state_id: EntryId | None = None  # place in outputs of its latest RequestState with the prompt
    was_admitted: bool = False
    num_deaths: int = 0  # of workers, one after the other, that were computing it
    computes_prefix: bool = False  # computes a prefix to be pinned: no client knows of it
    passed_since: int = 0  # step in which it first came first but lacked slots; 0: in none
    chain: Chain | None = None  # names of its blocks, once it has asked for any
    search: BeamSearch | None = None
    handle: int = 0  # under which results speak of the beam search
    parents: list[int] = field(default_factory=list)  # handles that the beams go on from
    awaited_step: int = 0  # whose result the beam search needs next; 0 if it has all
    rank: tuple[int, int] = field(init=False)  # lower is served earlier, and preempted later

    def __post_init__(self) -> None:
        self.rank = (self.submit.priority, self.arrival)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.submit.request_id

    @property
    def num_slots(self) -> int:
        """Sequences that it may come to have."""
        return len(self.sequences) if self.search is None else self.search.params.width

    @property
    def is_swapped(self) -> bool:
        """Whether its keys and values wait in the host pool."""
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
        """Event how long the sequences are, and which of them have to be computed."""
        self.store_beam_outputs()
        num_output = len(self.sequences[0].output)
        self.num_tokens = self.num_prompt_tokens + num_output
        # While nothing is generated all sequences are equal: the first is computed, the others
        # fork from it.
        self.prefilled = list(self.sequences) if num_output else self.sequences[:1]

    def store_beam_outputs(self) -> None:
        """Write down what each running beam has generated as its sequence's output."""
        if self.search is not None:
            for sequence, beam in zip(self.sequences, self.search.running, strict=True):
                sequence.output = beam.tokens()

    def next_position(self, step: int) -> int:
        """Where the sequences of a running group write in this step."""
        if self.state is SEARCHING:
            return self.num_tokens - 1
        return self.num_tokens + step - self.decode_from

    def kv_tokens_at(self, step: int, sequence: Sequence) -> int:
        """Tokens with keys and values of a sequence once ``step`` is done."""
        if self.state in (DECODING, FINISHING):
            return self.num_tokens + min(step, self.last_step) - self.decode_from + 1
        if self.state is SEARCHING:
            return self.num_tokens - (self.awaited_step == 0)
        return sequence.num_planned if sequence.block_table else 0
