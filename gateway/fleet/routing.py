"""Chooses the engine of a request: a pure function of the request and of what is known of engines.

An engine's score is the share of the prompt that it probably has cached, less what its load exceeds
the mean by. It is computed for each request, so one busy engine changes nothing for others.
Engines with a part of the prompt in their caches are always considered, and all others if they are
few. Of many, a sample is drawn by the request's random id (the power of several choices).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

LOAD_WEIGHT = 0.3
TOKENS_PER_REQUEST = 2_000  # prompt tokens that wait, which count as much as a request that runs
_CONSIDER_ALL = 16  # engines
_SAMPLE = 8
_ID_BITS = 128


class Reason(StrEnum):
    """Why an engine was chosen."""

    ONLY = "only"  # no other can take the request
    PREFIX = "prefix"  # it probably has a part of the prompt cached
    LOAD = "load"  # its load is the lowest of those considered
    MOVED = "moved"  # the request's engine ends, or was lost


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine of a request.

    Attributes:
        expected_tokens: of the prompt that it probably has cached.
    """

    engine: str
    reason: Reason
    expected_tokens: int = 0


@dataclass(slots=True)
class EngineLoad:
    """The load of an engine: its requests, and prompt tokens that are still to be computed.

    Attributes:
        polled: by its last lease.
        sent: that this gateway has sent there since.
    """

    name: str
    polled: float = 0.0
    sent: float = 0.0

    def take_lease(self, num_requests: int, num_waiting_tokens: int) -> None:
        """Replace what was known by the numbers of a new lease."""
        self.polled, self.sent = num_requests + num_waiting_tokens / TOKENS_PER_REQUEST, 0.0

    def send(self, num_tokens: int) -> None:
        """Count a request with so many prompt tokens to compute."""
        self.sent += 1 + num_tokens / TOKENS_PER_REQUEST

    @property
    def value(self) -> float:
        """The load now, as far as is known."""
        return self.polled + self.sent


def mean_load(engines: Iterable[EngineLoad]) -> float:
    """The mean load of engines, at least that of one request."""
    values = [engine.value for engine in engines]
    return max(1.0, sum(values) / len(values)) if values else 1.0


def choose(
    request_id: str,
    num_tokens: int,
    expected: Mapping[str, int],
    engines: Sequence[EngineLoad],
    mean: float,
    by_name: Mapping[str, EngineLoad],
    load_weight: float = LOAD_WEIGHT,
) -> Choice:
    """The engine with the best score; of equal ones, the less loaded.

    Args:
        request_id: random, in hexadecimal digits.
        num_tokens: of the prompt.
        expected: tokens of it that engines probably have cached.
        engines: those that can take the request, at least one.
        mean: their mean load.
        by_name: the same engines.
    """
    if len(engines) == 1:
        name = engines[0].name
        return Choice(name, Reason.ONLY, expected.get(name, 0))
    considered = [by_name[name] for name in expected if name in by_name]
    if len(engines) <= _CONSIDER_ALL:
        considered = list(engines)
    else:
        bits, count = int(request_id, 16), len(engines)
        shifts = range(0, _ID_BITS, _ID_BITS // _SAMPLE)
        considered += [engines[(bits >> shift) % count] for shift in shifts]

    def score(engine: EngineLoad) -> tuple[float, float]:
        share = expected.get(engine.name, 0) / num_tokens
        load = engine.value
        return share - load_weight * (load - mean) / mean, -load

    best = max(considered, key=score)
    num_expected = expected.get(best.name, 0)
    return Choice(best.name, Reason.PREFIX if num_expected else Reason.LOAD, num_expected)
