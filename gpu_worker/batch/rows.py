"""The rows that one step computes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.codec import IntArray
from shared.messages.plans import BeamStep

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Tokens [start, stop) of a sequence that does not decode yet."""

    slot: int
    handle: int
    tokens: IntArray  # [num_tokens - start] those from ``start`` on
    start: int
    stop: int
    num_prompt_tokens: int
    num_prompt_logprobs: int | None  # top ones at each prompt position; None: no log-probabilities
    is_beam: bool

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return self.stop - self.start

    @property
    def reaches_last(self) -> bool:
        """Whether the chunk has the last token, so that the next one can be chosen."""
        return self.size == len(self.tokens)

    @property
    def samples(self) -> bool:
        """Whether the next token is chosen here, and the sequence decodes from then on."""
        return self.reaches_last and not self.is_beam

    @property
    def num_scored(self) -> int:
        """Leading rows of the chunk that have the logits of a prompt token."""
        if self.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.stop, self.num_prompt_tokens - 1) - self.start)


@dataclass(frozen=True, slots=True)
class Forks:
    """New sequences that sample in this step from their parents' logits."""

    parents: Indices  # [F] slots
    children: Indices  # [F] slots, the last F of those that sample
    logit_rows: Indices  # [R] row of the logits that each sequence samples from


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The beams of a group, which all compute their last tokens in this step."""

    step: BeamStep
    slots: Indices  # [w]
    rows: Indices  # [w] rows of their last tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """A ragged batch; decoding sequences come first, with one row each.

    S sequences, T rows (tokens to compute), R sequences that sample, F of them children of forks.
    """

    slots: Indices  # [S]
    positions: Indices  # [T]
    slot_mapping: Indices  # [T]
    sizes: Indices | None  # [S] rows of each sequence; None: one each, so T == S
    chunks: tuple[ChunkRows, ...]  # of the last sequences, in their order
    sampled: Indices  # [R] slots that sample, children of forks last
    sample_rows: Indices | None  # [R - F] rows of the others; None: every row samples
    forks: Forks | None
    beams: tuple[BeamRows, ...]
    version: int  # of the batch: equal versions have the same decoding slots

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def num_decoding(self) -> int:
        """Leading sequences that decode: each computes the token that it sampled last."""
        return len(self.slots) - len(self.chunks)

    @property
    def only_decodes(self) -> bool:
        """Whether only sequences sample that decode already."""
        return len(self.sampled) == self.num_decoding
