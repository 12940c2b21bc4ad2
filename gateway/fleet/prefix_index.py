"""The prefixes that each engine probably has in its prefix cache, from what was sent there.

A prompt is cut at fixed boundaries, and each beginning is named by a hash of all tokens up to
there. The hash begins with tenant and salt, so that equal prompts of other tenants are different
prefixes, as in the engines' own caches.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from shared.codec import IntArray

# Boundaries lie close where most prompts end: (tokens between boundaries, up to).
_STEPS = ((16, 128), (64, 4_096), (512, 131_072))
BOUNDARIES = (0, *(at for (step, end), begin in zip(_STEPS, (0, 128, 4_096), strict=True)
                   for at in range(begin + step, end + 1, step)))  # fmt: skip
_ENGINES_PER_PREFIX = 32  # the last ones that got it for the first time


@dataclass(frozen=True, slots=True)
class PromptPrefixes:
    """The beginnings of a prompt.

    Attributes:
        hashes: of the beginnings, shortest first.
        lengths: of the same, in tokens.
        num_tokens: of the whole prompt.
    """

    hashes: list[int]
    lengths: Sequence[int]
    num_tokens: int


def prefixes_of(prompt: IntArray, tenant: str, salt: str) -> PromptPrefixes:
    """The beginnings of a prompt [num_tokens] of a tenant; about a microsecond for each."""
    found = blake2b(digest_size=8)
    for part in (tenant, salt):
        data = part.encode()
        found.update(len(data).to_bytes(4, "little") + data)
    data = prompt.astype("<i4", copy=False).tobytes()
    hashes: list[int] = []
    lengths: list[int] = []
    for begin, end in pairwise(BOUNDARIES):
        if end > len(prompt):
            break
        found.update(data[4 * begin : 4 * end])
        hashes.append(int.from_bytes(found.copy().digest(), "little"))
        lengths.append(end)
    return PromptPrefixes(hashes, lengths, len(prompt))


class PrefixIndex:
    """Maps prefixes to the engines that were sent them last; bounded.

    Args:
        max_prefixes: beyond that number, those that were not sent for longest are forgotten.
    """

    def __init__(self, max_prefixes: int = 100_000) -> None:
        self._max_prefixes = max_prefixes
        # By recency, as the engines of each. A prefix is never older than one that continues it.
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def expected(self, prompt: PromptPrefixes) -> dict[str, int]:
        """Tokens of a prompt that engines probably have cached, for a few of those with most.

        Looks at the longest known prefix, and at ones half, a quarter, ... as long.
        """
        known = self._num_known(prompt.hashes)
        found: dict[str, int] = {}
        while known:
            for engine in self._engines[prompt.hashes[known - 1]]:
                found.setdefault(engine, prompt.lengths[known - 1])
            known //= 2
        return found

    def sent(self, hashes: Sequence[int], engine: str) -> None:
        """Enter a prompt that was sent to an engine, by the hashes of its beginnings."""
        for name in reversed(hashes):  # the shortest last: it is the most recent
            engines = self._engines.pop(name, ())
            if engine not in engines:
                engines = (engine, *engines[: _ENGINES_PER_PREFIX - 1])
            self._engines[name] = engines
        while len(self._engines) > self._max_prefixes:
            self._engines.popitem(last=False)

    def _num_known(self, hashes: Sequence[int]) -> int:
        """Number of the leading prefixes that are known, by bisection."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._engines:
                low = middle
            else:
                high = middle - 1
        return low
