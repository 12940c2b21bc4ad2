"""The interface of simulated servers: their scheduling and their memory."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a trace.

    Attributes:
        id: unique within a run.
        arrival_s: on the virtual clock.
        prompt_tokens: length of its prompt.
        output_tokens: that each of its choices generates; only an oracle may use it in advance.
        num_samples: choices drawn independently from one prompt.
        beam_width: width of a beam search; 0: none.
        prefix: ids of the shared content of its prompt, one per ``prefix_block_tokens`` tokens;
            equal ids at equal places after equal ids mean equal tokens.
        prefix_block_tokens: tokens per id.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    num_samples: int = 1
    beam_width: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0


# Every iteration makes one object of each class below. Compiled by mypyc, a hand-written __init__
# takes a tenth of the time of a dataclass's own, or of a named tuple's.


@dataclass(slots=True)
class Work:
    """The work of one iteration, as far as its duration depends on it.

    Attributes:
        prefill_tokens: prompt tokens computed, of all requests.
        prefill_context: sum over those tokens of the tokens that each attends to.
        decode_tokens: sequences that compute one token.
        decode_context: sum over those sequences of the tokens that each attends to.
        sampled_rows: rows whose logits are computed.
        swapped_bytes: between device and host, both ways.
        swap_copies: transfers of those bytes, each of which has a fixed cost.
        copied_bytes: within the device, for copy-on-write.
        mapped_pages: that the driver maps or unmaps before the iteration can run.
    """

    prefill_tokens: int
    prefill_context: int
    decode_tokens: int
    decode_context: int
    sampled_rows: int
    swapped_bytes: int
    copied_bytes: int
    mapped_pages: int
    swap_copies: int

    def __init__(
        self,
        prefill_tokens: int = 0,
        prefill_context: int = 0,
        decode_tokens: int = 0,
        decode_context: int = 0,
        sampled_rows: int = 0,
        swapped_bytes: int = 0,
        copied_bytes: int = 0,
        mapped_pages: int = 0,
        swap_copies: int = 0,
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self.prefill_context = prefill_context
        self.decode_tokens = decode_tokens
        self.decode_context = decode_context
        self.sampled_rows = sampled_rows
        self.swapped_bytes = swapped_bytes
        self.copied_bytes = copied_bytes
        self.mapped_pages = mapped_pages
        self.swap_copies = swap_copies


@dataclass(slots=True)
class MemoryUse:
    """The uses of the KV memory, in token slots; the parts sum to ``total``.

    The terms are those of PagedAttention, Figure 2: *reserved* slots will hold a token of this
    request later, *internal* fragmentation never will, *external* slots are free but in pieces that
    the allocator cannot use. *Shared* is no part of the total: these slots would be needed in
    addition if sequences shared nothing.
    """

    total: int
    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int

    def __init__(
        self,
        total: int,
        token_states: int,
        reserved: int,
        internal: int,
        external: int,
        free: int,
        shared: int = 0,
    ) -> None:
        self.total = total
        self.token_states = token_states
        self.reserved = reserved
        self.internal = internal
        self.external = external
        self.free = free
        self.shared = shared


@dataclass(slots=True)
class Progress:
    """The progress by an iteration that has ended.

    Attributes:
        first_tokens: requests that got their first token.
        finished: requests that are complete.
        num_tokens: tokens generated, of all choices.
    """

    first_tokens: tuple[int, ...]
    finished: tuple[int, ...]
    num_tokens: int

    def __init__(
        self, first_tokens: tuple[int, ...], finished: tuple[int, ...], num_tokens: int
    ) -> None:
        self.first_tokens = first_tokens
        self.finished = finished
        self.num_tokens = num_tokens


class System(Protocol):
    """A server with one engine: our scheduler, or a baseline's."""

    def submit(self, request: SimRequest) -> None:
        """Queue a request, which arrives now.

        Raises:
            ValueError: it can never be served, for example because it is longer than the memory.
        """

    def start(self, now_s: float) -> Work | None:
        """Choose the next iteration; None if there is nothing to compute before an arrival."""

    def finish(self, now_s: float) -> Progress:
        """End the iteration that was started last."""

    def memory(self) -> MemoryUse:
        """Use of the KV memory between two iterations."""

    @property
    def num_running(self) -> int:
        """Requests with computed tokens in device memory."""

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and are neither running nor complete."""

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
