"""A trial at load: whether a library multiplies a layer's rows faster than our kernel does.

A layer changes to the library from a number of rows on, if that is faster for all numbers of rows
from there on, and if it gives the same bits: a token's logits must not depend on how many rows are
computed with it. The library reads the packed weights, so there is no second copy of them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.layers import CpuLinear
from kernels.cpu.linear.library_blocks import LIBRARY_ROWS, Library

logger = logging.getLogger(__name__)

_BUDGET_S = 1.0
_ROWS = (LIBRARY_ROWS, 3 * LIBRARY_ROWS)
_ODD_ROWS = 3 * LIBRARY_ROWS + 5  # of which our kernel multiplies some in either case
_GROUPS = 32  # of outputs, at most
_TURNS = 3
# The library has to be faster by more than the noise of so few turns.
_FASTER = 0.95
_ALWAYS, _NEVER = 1, 1 << 40


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found for layers of a shape.

    Attributes:
        fewest_rows: from so many rows on the library multiplies; None: it never does.
        because: the reason.
        ours_ms, library_ms: best times of one thread, by the numbers of rows that were tried.
    """

    fewest_rows: int | None
    because: str
    ours_ms: tuple[float, ...] = ()
    library_ms: tuple[float, ...] = ()

    def for_log(self) -> dict[str, Any]:
        """Fields of its log line."""
        chosen = "ours" if self.fewest_rows is None else f"library from {self.fewest_rows} rows"
        found = {"chosen": chosen, "because": self.because}
        if self.ours_ms:
            found["rows"] = ",".join(map(str, _ROWS))
            found["ours_ms"] = ",".join(f"{each:.3f}" for each in self.ours_ms)
            found["library_ms"] = ",".join(f"{each:.3f}" for each in self.library_ms)
        return found


class LibraryTrial:
    """Tries layers, each shape once, until the time for trials is used up.

    Args:
        library: None: none serves this CPU, and nothing is tried.
        budget_s: for all trials together, of this thread's processor time.
        clock: that time in seconds; other processes do not make it longer.
    """

    def __init__(
        self,
        library: Library | None,
        budget_s: float = _BUDGET_S,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._library = library
        self._left_s = budget_s
        self._clock = clock
        self._found: dict[tuple[int, int, bool, torch.dtype], Finding] = {}

    def choose(self, linear: CpuLinear) -> Finding | None:
        """Try a layer, or take what was found for its shape, and let it compute so.

        None: the library does not multiply what the layer does.
        """
        if self._library is None or not linear.multiplies_pairs:
            return None
        layers = linear.layers
        outputs = len(layers.weight) * fields.PANEL
        shape = (layers.in_features, outputs, layers.gated, linear.out_dtype)
        if shape not in self._found:
            began_s = self._clock()
            found = self._found[shape] = self._try(self._library, linear.first_groups(_GROUPS))
            self._left_s -= self._clock() - began_s
            logged = {"inputs": layers.in_features, "outputs": outputs, **found.for_log()}
            logger.info("linear layers tried", extra={"fields": logged})
        linear.use_library(self._library, self._found[shape].fewest_rows or _NEVER)
        return self._found[shape]

    def _try(self, library: Library, linear: CpuLinear) -> Finding:
        if self._left_s <= 0:
            return Finding(None, "the time for trials was used up")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_ODD_ROWS, linear.layers.in_features, generator=generator).bfloat16()

        def compute(num_rows: int, fewest_rows: int) -> torch.Tensor:
            linear.use_library(library, fewest_rows)
            return linear(x[:num_rows], on_one_thread=True)[0]

        if not torch.equal(compute(_ODD_ROWS, _ALWAYS), compute(_ODD_ROWS, _NEVER)):
            return Finding(None, "the library's bits differ")
        ours_ms, library_ms = (
            tuple(1e3 * self._best_s(lambda: compute(num_rows, fewest)) for num_rows in _ROWS)  # noqa: B023
            for fewest in (_NEVER, _ALWAYS)
        )
        fewest_rows = None
        for num_rows, ours, theirs in reversed(list(zip(_ROWS, ours_ms, library_ms, strict=True))):
            if theirs >= _FASTER * ours:
                break
            fewest_rows = num_rows
        because = "ours is as fast" if fewest_rows is None else "it is faster, with the same bits"
        return Finding(fewest_rows, because, ours_ms, library_ms)

    def _best_s(self, compute: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(_TURNS):
            began_s = self._clock()
            compute()
            best = min(best, self._clock() - began_s)
        return best
