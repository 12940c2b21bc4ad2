"""Sequences and requests of an engine's view."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shared.codec import IntArray
from shared.messages.plans import Admission, StepPlan
from shared.messages.snapshots import RequestPhase


@dataclass(slots=True, eq=False)
class SequenceView:
    """A sequence with blocks.

    Attributes:
        request: that it belongs to.
        num_computed: tokens with keys and values, while it is not decoding.
        num_tokens: at its admission.
        decode_from: first step that computes a token behind these; 0: none is planned.
        last_step: the last step that can compute one.
    """

    handle: int
    request: "RequestView"
    num_computed: int
    num_tokens: int
    decode_from: int = 0
    last_step: int = 0
    _table: list[int] = field(default_factory=list)
    _packed: IntArray | None = None

    @property
    def table(self) -> IntArray:
        """The block table; [num_blocks]."""
        if self._packed is None:
            self._packed = np.array(self._table, np.int32)
        return self._packed

    @table.setter
    def table(self, blocks: IntArray) -> None:
        self._table, self._packed = blocks.tolist(), blocks

    def first_blocks(self, num_blocks: int) -> list[int]:
        """At most the first ``num_blocks`` of the table."""
        return self._table[:num_blocks]

    def grow(self, block: int) -> None:
        """Append a block."""
        self._table.append(block)
        self._packed = None

    def replace(self, column: int, block: int) -> None:
        """Put another block into the table."""
        if column < len(self._table):
            self._table[column] = block
            self._packed = None

    def fork(self, handle: int) -> "SequenceView":
        """A sequence with the same tokens and blocks."""
        child = SequenceView(
            *(handle, self.request, self.num_computed, self.num_tokens),
            *(self.decode_from, self.last_step),
        )
        child.table = self.table
        return child

    def start_decoding(self, step: int) -> None:
        """The plan of ``step`` computes its last token of those that there are."""
        num_generated = self.num_tokens - self.request.num_prompt_tokens
        self.decode_from = step + 1
        self.last_step = step + self.request.max_output - num_generated - 1

    def num_kv_tokens(self, step: int) -> int:
        """Tokens with keys and values after ``step``."""
        if self.decode_from:
            return self.num_tokens + max(0, min(step, self.last_step) - self.decode_from + 1)
        return self.num_computed


@dataclass(slots=True, eq=False)
class RequestView:
    """A request.

    Attributes:
        number: that stands for its id where the id may not be shown.
        num_generated: tokens of all its choices.
        search: handle of its beam search in results; 0: it is none.
        handles: of its choices that have not ended, by choice; empty where they are not known.
        beams: handles of earlier beams of its search.
        hosts: blocks of the host pool, by handle, while it is swapped out.
        end: the reason of its end.
    """

    number: int
    request_id: str
    tenant: str
    phase: RequestPhase = RequestPhase.WAITING
    priority: int = 0
    accepted_ms: int = 0
    num_prompt_tokens: int = 0
    max_output: int = 0
    num_generated: int = 0
    search: int = 0
    handles: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, SequenceView] = field(default_factory=dict)  # by handle
    beams: set[int] = field(default_factory=set)
    hosts: dict[int, IntArray] = field(default_factory=dict)
    end: str = ""

    def row(self) -> list[int]:
        """What is shown of it, as numbers."""
        return [
            *(self.number, self.phase, self.num_prompt_tokens, self.num_generated),
            *(self.priority, max(1, len(self.handles)), self.accepted_ms, self.max_output),
            int(self.search != 0),
        ]

    def swap_out(self, plan: StepPlan) -> None:
        """Give the host blocks that take its device blocks in this plan to its sequences."""
        # Each group that is swapped out has added its blocks, in the order of the preemptions.
        first = 0
        for found in plan.preemptions:
            if found.request_id == self.request_id:
                break
            first += found.num_blocks if found.kind == "swap" else 0
        hosts = plan.swap_out_host[first : first + found.num_blocks]
        if self.search:  # its beams may be others than those of the last plan
            self.hosts[self.search] = hosts
            return
        devices = plan.swap_out_device[first : first + found.num_blocks].tolist()
        host_of = dict(zip(devices, hosts.tolist(), strict=True))
        for handle, sequence in self.sequences.items():
            blocks = [host_of[block] for block in sequence.table.tolist() if block in host_of]
            self.hosts[handle] = np.array(blocks, np.int32)


def preempted_search(requests: Iterable[RequestView], admission: Admission) -> RequestView | None:
    """The beam search of a beam that came of a result after the search was preempted."""
    found = (
        request
        for request in requests
        if request.search
        and request.num_prompt_tokens == admission.num_prompt_tokens
        and request.phase not in (RequestPhase.DECODE, RequestPhase.ENDED)
    )
    return min(found, key=lambda one: (one.priority, one.accepted_ms), default=None)
