"""Requests to simulate: from a trace, or look-alikes of a dataset with random arrivals."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.simulator.lengths import DATASETS, Dataset
from benchmarks.simulator.system import SimRequest
from benchmarks.simulator.traces import (
    has_arrivals,
    read_trace,
    sped_up,
    with_poisson_arrivals,
)
from shared.errors import SettingsError

_AT_ONCE = 4_096  # look-alikes that are drawn together
_SUFFIX = "-like"
LOOK_ALIKES = tuple(f"{dataset.name}{_SUFFIX}" for dataset in DATASETS)


def look_alikes(dataset: Dataset, limit: int, random: np.random.Generator) -> Iterator[SimRequest]:
    """An endless sequence of requests with a dataset's lengths, without arrivals.

    Args:
        limit: tokens of prompt and output together.
        random: draws the lengths.
    """
    number = 0
    while True:
        for lengths in dataset.draw(_AT_ONCE, limit, random):
            yield SimRequest(number, float("nan"), lengths.prompt, lengths.output)
            number += 1


class Workload:
    """A source of requests at any rate, any number of times.

    Args:
        source: a file (see ``traces``) or the name of a look-alike.
        limit: tokens of prompt and output together; longer requests of a trace are left out.

    Raises:
        SettingsError: no such look-alike, or no request of the trace fits.
        TraceError: the trace cannot be read.
    """

    def __init__(self, source: str, limit: int) -> None:
        self.source = source
        self._limit = limit
        self._dataset: Dataset | None = None
        self._trace: list[SimRequest] = []
        self.num_left_out = 0
        if source in LOOK_ALIKES:
            self._dataset = next(
                found for found in DATASETS if found.name == source.removesuffix(_SUFFIX)
            )
            return
        if not Path(source).exists():
            reason = f"neither a file nor one of {', '.join(LOOK_ALIKES)}"
            raise SettingsError("--trace", source, reason)
        found = read_trace(Path(source))
        self._trace = [
            request for request in found if request.prompt_tokens + request.output_tokens <= limit
        ]
        self.num_left_out = len(found) - len(self._trace)
        if not self._trace:
            raise SettingsError("--trace", source, f"no request fits into {limit} tokens")

    @property
    def has_arrivals(self) -> bool:
        """Whether the trace has arrival times."""
        return bool(self._trace) and has_arrivals(self._trace)

    @property
    def own_rate(self) -> float | None:
        """Requests per second of the trace, if it has arrivals."""
        if not self.has_arrivals or self._trace[-1].arrival_s <= 0:
            return None
        return len(self._trace) / self._trace[-1].arrival_s

    def requests(self, rate: float | None, duration_s: float, seed: int) -> Iterator[SimRequest]:
        """The requests that arrive within a time.

        A trace with arrivals is played once, faster or slower if a rate is given. From one without,
        requests are drawn at random, with random arrivals.

        Args:
            rate: requests per second; None: the trace's own, which must have arrivals.
            duration_s: from the first arrival on.
            seed: of all random numbers.

        Raises:
            SettingsError: there is no rate.
        """
        for request in self._arriving(rate, np.random.default_rng(seed)):
            if request.arrival_s >= duration_s:
                return
            yield request

    def _arriving(self, rate: float | None, random: np.random.Generator) -> Iterator[SimRequest]:
        own = self.own_rate
        if own is not None:
            factor = 1.0 if rate is None else rate / own
            return iter(self._trace) if factor == 1.0 else sped_up(self._trace, factor)
        if rate is None or rate <= 0:
            reason = f"{self.source} has no arrivals: it needs a rate above 0"
            raise SettingsError("--rate", rate, reason)
        if self._dataset is not None:
            return with_poisson_arrivals(
                look_alikes(self._dataset, self._limit, random), rate, random
            )
        return with_poisson_arrivals(self._drawn(random), rate, random)

    def _drawn(self, random: np.random.Generator) -> Iterator[SimRequest]:
        """The trace's requests in random order, repeatedly, each time in another order."""
        number = 0
        while True:
            for index in random.permutation(len(self._trace)).tolist():
                found = self._trace[index]
                yield SimRequest(
                    number,
                    float("nan"),
                    found.prompt_tokens,
                    found.output_tokens,
                    prefix=found.prefix,
                    prefix_block_tokens=found.prefix_block_tokens,
                )
                number += 1
