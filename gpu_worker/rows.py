"""What one step computes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.codec import IntArray

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Tokens [start, stop) of a sequence that does not decode yet."""

    slot: int
    handle: int
    tokens: IntArray  # all of the sequence's
    start: int
    stop: int
    num_prompt_tokens: int
    num_prompt_logprobs: int | None  # top ones wanted at each prompt position; None: nothing

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one can be drawn."""
        return self.stop == len(self.tokens)

    @property
    def token_ids(self) -> Indices:
        """Tokens to compute, [size]."""
        return self.tokens[self.start : self.stop].astype(np.int64)

    @property
    def num_scored(self) -> int:
        """Leading rows of the chunk whose logits score a token of the prompt."""
        if self.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.stop, self.num_prompt_tokens - 1) - self.start)


@dataclass(frozen=True, slots=True)
class Forks:
    """New sequences that sample in this step from their parents' logits."""

    parents: Indices  # [F] slots
    children: Indices  # [F] slots, the last F of those that sample
    logit_rows: Indices  # [R] which row of the logits each sequence samples from


@dataclass(frozen=True, slots=True)
class Rows:
    """A ragged batch; decoding sequences come first, with one row each."""

    slots: Indices  # [S]
    token_ids: Indices  # [T]
    positions: Indices  # [T]
    slot_mapping: Indices  # [T]
    sizes: Indices | None  # [S] rows of each sequence; None: one each, so T == S
    chunks: tuple[ChunkRows, ...]  # of the last sequences, in their order
    sampled: Indices  # [R] slots that sample, children of forks last
    sample_rows: Indices | None  # [R - F] rows of those before; None: every row samples
    forks: Forks | None
    version: int  # of the batch: if equal and nothing is new, the slots are the same

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Whether nothing is new: no chunks and no forks."""
        return not self.chunks and self.forks is None
