"""Sizes that steps are padded to, because a captured CUDA graph serves one size only."""

from collections.abc import Iterator
from dataclasses import dataclass

_FIRST_DECODES = (1, 2, 4)
_STEP = 8  # between decode sizes, and the smallest between mixed sizes
_FINE_DECODES = 256
_COARSE_STEP = 64
# Larger steps compute longer than their launches take, and padding them would waste more.
_LARGEST_MIXED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Bucket:
    """One padded size.

    Attributes:
        num_tokens: rows of the batch, padding included.
        num_seqs: sequences, padding included.
        decodes: True: every sequence has one row, which samples. False: a sequence has any number
            of rows, of which at most one samples.
    """

    num_tokens: int
    num_seqs: int
    decodes: bool

    def __str__(self) -> str:
        return f"{self.num_tokens} {'decodes' if self.decodes else 'tokens'}"


class Buckets:
    """All sizes of one worker; chooses the one for a step.

    Args:
        max_num_batched_tokens: of a step.
        max_num_sequences: of a step.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_sequences: int) -> None:
        decodes = min(max_num_sequences, max_num_batched_tokens)
        self._decodes = [Bucket(size, size, True) for size in decode_sizes(decodes)]
        self._mixed = [
            Bucket(size, min(size, max_num_sequences), False)
            for size in mixed_sizes(max_num_batched_tokens)
        ]

    def __iter__(self) -> Iterator[Bucket]:
        """All sizes, largest first: smaller graphs then reuse the memory of the largest."""
        both = [*self._decodes, *self._mixed]
        return iter(sorted(both, key=lambda bucket: bucket.num_tokens, reverse=True))

    def choose(self, num_tokens: int, num_seqs: int, decodes: bool) -> Bucket | None:
        """The smallest size that fits the step; None if all are too small."""
        for bucket in self._decodes if decodes else self._mixed:
            if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
                return bucket
        return None


def decode_sizes(most: int) -> list[int]:
    """Numbers of sequences of the decode buckets, ascending; the last is ``most``."""
    sizes = [
        *_FIRST_DECODES,
        *range(_STEP, _FINE_DECODES, _STEP),
        *range(_FINE_DECODES, most, _COARSE_STEP),
    ]
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens of the mixed buckets, ascending, a quarter of a power of two apart."""
    most = min(most, _LARGEST_MIXED_TOKENS)
    sizes, size = [], _STEP
    while size < most:
        sizes.append(size)
        size += max(_STEP, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, most]
