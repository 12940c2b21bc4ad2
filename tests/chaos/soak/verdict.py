"""Finds leaks in samples that were taken whenever everything was idle. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.serving.processes import Held, Kept

_WARM_UP = 2  # first samples of a process that do not count: caches and the pool fill
_FEWEST = 4  # samples for a slope
_LEAST_MINUTES = 5.0  # between the first of these samples and the last
_MOST_PER_MINUTE = 0.005  # tolerated growth of a process, relative to its size
# A gateway under attack holds more or less at each sample, as large answers come and go. What it
# has grown by must exceed its typical deviation from its own trend by this factor.
_NOT_BY_CHANCE = 3.0
_MOST_REDIS_GROWTH = 1.5  # between the first samples and the last
_SPARE_BYTES = 4 * 2**20  # smaller growth of Redis is no leak
_SPARE_FDS = 6  # connections to Redis stay open, as many as were ever needed at once
_SPARE_ENTRIES = 300  # appended between two trimmings
_SPARE_KEYS = 20  # leases of gateways that died recently, and keys that are about to expire


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of everything, at a time at which nothing runs.

    Attributes:
        at_min: since the start.
        processes: by service.
        idle_after_s: seconds until nothing ran and no block was used; None: never.
        left: what was not idle then, as text.
    """

    at_min: float
    processes: dict[str, Held]
    redis: Kept
    idle_after_s: float | None
    left: str


def leaks(samples: Sequence[Sample], outputs_retention: int) -> list[str]:
    """What grows although it should not, as sentences.

    Args:
        samples: in order; a process that was restarted is another process.
        outputs_retention: entries of the outputs log that are kept for slow readers, and plans for
            the page.
    """
    found = [
        f"minute {sample.at_min:.1f}: not idle: {sample.left}"
        for sample in samples
        if sample.idle_after_s is None
    ]
    for name, life in lives(samples):
        found += _grown(name, life)
    found += _kept_too_much(samples, outputs_retention)
    return found


def lives(samples: Sequence[Sample]) -> list[tuple[str, list[tuple[float, Held]]]]:
    """Every process with its samples and their times."""
    found: dict[tuple[str, int], list[tuple[float, Held]]] = {}
    for sample in samples:
        for name, held in sample.processes.items():
            found.setdefault((name, held.pid), []).append((sample.at_min, held))
    return [(name, life) for (name, _), life in found.items()]


def slope_per_min(life: Sequence[tuple[float, Held]]) -> float | None:
    """Bytes per minute by which a warm process grows: the median over all pairs of samples.

    None if it has too few samples, or did not live long enough.
    """
    warm = life[_WARM_UP:]
    if len(warm) < _FEWEST or warm[-1][0] - warm[0][0] < _LEAST_MINUTES:
        return None
    pairs = itertools.combinations(warm, 2)
    return median((b.rss_bytes - a.rss_bytes) / (t - s) for (s, a), (t, b) in pairs)


def growth(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The growth of every process, for a report."""
    return [
        {
            "service": name,
            "pid": life[0][1].pid,
            "minutes": life[-1][0] - life[0][0],
            "num_samples": len(life),
            "first_mib": life[0][1].rss_bytes / 2**20,
            "last_mib": life[-1][1].rss_bytes / 2**20,
            "mib_per_min": None if slope is None else slope / 2**20,
        }
        for name, life in lives(samples)
        for slope in [slope_per_min(life)]
    ]


def shown(sample: Sample) -> str:
    """A sample in one line."""
    sizes = " ".join(
        f"{name} {held.rss_bytes / 2**20:.0f} MiB/{held.num_fds} fds"
        for name, held in sample.processes.items()
    )
    kept = sample.redis
    idle = "NOT IDLE" if sample.idle_after_s is None else f"idle after {sample.idle_after_s:.1f} s"
    return (
        f"minute {sample.at_min:4.1f}: {idle}; {sizes}; Redis data {kept.used_bytes / 2**20:.1f} "
        f"MiB, logs {kept.requests}/{kept.plans}/{kept.outputs} of {kept.log_bytes / 2**20:.1f} MiB"
    )


def _grown(name: str, life: Sequence[tuple[float, Held]]) -> list[str]:
    slope = slope_per_min(life)
    if slope is None:
        return []
    found = []
    size = life[-1][1].rss_bytes
    if slope > _MOST_PER_MINUTE * size and _exceeds_chance(slope, life[_WARM_UP:]):
        found.append(f"{name} of {size / 2**20:.0f} MiB grows by {slope / 2**20:.2f} MiB a minute")
    fds = [held.num_fds for _, held in life[1:]]
    half = len(fds) // 2
    if median(fds[half:]) > median(fds[:half]) + _SPARE_FDS:
        found.append(f"{name} has ever more descriptors: {fds}")
    return found


def _exceeds_chance(slope: float, warm: Sequence[tuple[float, Held]]) -> bool:
    """Whether the growth stands out of the fluctuation around it."""
    around = [held.rss_bytes - slope * at_min for at_min, held in warm]
    deviation = median(abs(each - median(around)) for each in around)
    return slope * (warm[-1][0] - warm[0][0]) > _NOT_BY_CHANCE * deviation


def _kept_too_much(samples: Sequence[Sample], outputs_retention: int) -> list[str]:
    found = []
    for sample in samples[1:]:
        kept = sample.redis
        limits = {
            "requests": (kept.requests, _SPARE_ENTRIES),
            "plans": (kept.plans, outputs_retention + _SPARE_ENTRIES),
            "outputs": (kept.outputs, 2 * outputs_retention + _SPARE_ENTRIES),
        }
        found += [
            f"minute {sample.at_min:.1f}: {log} has {length} entries, more than {limit}"
            for log, (length, limit) in limits.items()
            if length > limit
        ]
    # Logs are bounded, and fill up to their bounds.
    sizes = [sample.redis.used_bytes - sample.redis.log_bytes for sample in samples]
    third = len(sizes) // 3
    if third:
        first, last = median(sizes[1 : 1 + third]), median(sizes[-third:])
        if last > _MOST_REDIS_GROWTH * first + _SPARE_BYTES:
            grown = f"{last / 2**20:.1f} MiB, at first {first / 2**20:.1f} MiB"
            found.append(f"Redis keeps beside the logs {grown}")
        keys = [sample.redis.num_keys for sample in samples]
        if median(keys[-third:]) > median(keys[1 : 1 + third]) + _SPARE_KEYS:
            found.append(f"Redis has ever more keys: {keys}")
    return found
