"""One sequence of tokens: what the scheduler remembers of it, and the states it goes through."""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages import Submit


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()  # never planned yet, in this epoch
    PREFILLING = auto()  # has blocks; some of its tokens are not in a plan yet
    DECODING = auto()  # computes one token in every plan without being named
    DRAINING = auto()  # its last possible token is planned; results are still to come
    PREEMPTED = auto()  # lost its blocks, waits to get them back
    ENDED = auto()


_S = SequenceState
_TRANSITIONS = {
    _S.WAITING: {_S.PREFILLING, _S.ENDED},
    _S.PREFILLING: {_S.DECODING, _S.DRAINING, _S.PREEMPTED, _S.ENDED},
    _S.DECODING: {_S.DRAINING, _S.PREEMPTED, _S.ENDED},
    _S.DRAINING: {_S.ENDED},
    _S.PREEMPTED: {_S.PREFILLING, _S.ENDED},
    _S.ENDED: set(),
}

NO_TOKENS: IntArray = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's one choice.

    Times are step numbers: in every step a decoding sequence grows by one token, so its length at
    any step follows from ``decode_from`` and needs no bookkeeping.
    """

    submit: Submit
    arrival: int  # order of acceptance
    handle: int
    max_output: int  # generated tokens at most: the request's limit or the context's end
    output: IntArray  # generated tokens, as of when the sequence was last without a slot
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None  # row of the scheduler's token array
    block_table: list[int] = field(default_factory=list)
    num_tokens: int = 0  # prompt and output when it was admitted
    num_planned: int = 0  # of those, tokens that are in a plan
    decode_from: int = 0  # first step that computes a token behind those
    next_block_step: int = 0  # step whose token opens a new block
    last_step: int = 0  # step that reaches max_output; if preempted: last that included it
    state_id: EntryId | None = None  # place of its latest RequestState in outputs
    was_admitted: bool = False

    @property
    def request_id(self) -> str:
        """Id of the request it belongs to."""
        return self.submit.request_id

    def move_to(self, state: SequenceState) -> None:
        """Change state."""
        assert state in _TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def kv_tokens_at(self, step: int) -> int:
        """Tokens with keys and values once ``step`` is done."""
        if self.state in (_S.DECODING, _S.DRAINING):
            return self.num_tokens + min(step, self.last_step) - self.decode_from + 1
        return self.num_planned
