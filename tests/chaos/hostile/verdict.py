"""Judges whether hostile clients have affected others, from the records of a soak. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from tests.chaos.disruptor import Outage
from tests.chaos.hostile.attacker import CLOSED, UNFINISHED
from tests.chaos.hostile.catalogue import ATTACKS
from tests.chaos.hostile.honest import Honesty
from tests.chaos.probe import Wait
from tests.chaos.soak.verdict import Sample, growth, leaks

_LONGEST_STALL_S = 1.0
_AFTER_OUTAGE_S = 1.0  # time for the effects of an outage on the disrupted service
_AFTER_ANY_OUTAGE_S = 15.0  # leases expire, and the engine becomes ready again
_FEWEST_QUESTIONS = 100  # of the probe; fewer are no evidence
_LAST_COMMAND_BYTES = 2**20  # size of the command with which Redis exceeds its limit
_MOST_SHOWN = 12
_MOST_NAMED = 6  # attacks, in the report of a stall
_GATEWAYS = ("gateway-1", "gateway-2")  # by the probe's index
_HONEST = frozenset(attack.name for attack in ATTACKS if attack.is_honest)
_SERVERS_FAULT = frozenset({"500", "502", "504"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of an attack; times are of the monotonic clock."""

    name: str
    from_s: float
    until_s: float
    status: str
    text: str


@dataclass(slots=True)
class Record:
    """The records of a soak.

    Attributes:
        attacks: names of those that were to run.
        calm_until_s: start of the first attack, on the monotonic clock.
        num_questions: of the probe, by kind.
        redis_peak_bytes: peak of Redis' memory.
        redis_refusals: commands that Redis refused because it was full, by its last process's
            counter.
        num_deletions: of the outputs log.
        accidents: processes that ended by themselves, and similar events.
    """

    attacks: Sequence[str]
    outputs_retention: int
    redis_limit_bytes: int
    samples: list[Sample] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    num_questions: dict[str, int] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    honest: Honesty = field(default_factory=Honesty)
    calm_until_s: float = 0.0
    redis_peak_bytes: int = 0
    redis_refusals: int = 0
    num_deletions: int = 0
    accidents: list[str] = field(default_factory=list)


def found(record: Record) -> list[str]:
    """Faults, as sentences."""
    return [
        *leaks(record.samples, record.outputs_retention),
        *_redis_too_large(record),
        *_stalled(record),
        *_unanswered(record),
        *_answered_wrongly(record),
        *_not_tried(record),
        *(f"an answer was lost: {what}" for what in record.honest.lost),
        *(f"an answer was changed: {what}" for what in record.honest.changed),
        *record.accidents,
    ]


def stall_s(wait: Wait) -> float:
    """How long a gateway did not answer although it and the probe had a core."""
    return wait.until_s - wait.from_s - wait.queued_s - wait.late_s


def stalls(record: Record) -> list[Wait]:
    """Waits for a cheap answer that no disruption to the gateway explains, the longest first."""
    waits = [
        wait
        for wait in record.waits
        if wait.question != "text" and not _struck(record.outages, wait)
    ]
    return sorted(waits, key=stall_s, reverse=True)


def report(record: Record) -> dict[str, Any]:
    """All figures, for a file."""
    answers: dict[str, Counter[str]] = {name: Counter() for name in record.attacks}
    for attempt in record.attempts:
        answers.setdefault(attempt.name, Counter())[attempt.status] += 1
    calm, hostile = _first_tokens_s(record)
    return {
        "found": found(record),
        "honest": {
            "answered": record.honest.answered,
            "resumed": record.honest.resumed,
            "lost": record.honest.lost,
            "changed": record.honest.changed,
            "ended_after_deletion": record.honest.ended,
        },
        "attacks": {name: dict(counts) for name, counts in answers.items()},
        "first_token_s": {"undisturbed": _spread(calm), "attacked": _spread(hostile)},
        "questions": record.num_questions,
        "longest_waits": [
            {
                "question": wait.question,
                "gateway": _GATEWAYS[wait.gateway],
                "after_s": wait.from_s - record.calm_until_s,
                "waited_s": wait.until_s - wait.from_s,
                "computed_s": wait.ran_s,
                "queued_s": wait.queued_s,
                "probe_late_s": wait.late_s,
                "during": _attempts_around(record, wait),
            }
            for wait in stalls(record)[:_MOST_SHOWN]
        ],
        "redis": {
            "limit_bytes": record.redis_limit_bytes,
            "peak_bytes": record.redis_peak_bytes,
            "commands_refused_at_limit": record.redis_refusals,
            "deletions_of_outputs": record.num_deletions,
        },
        "outages": [
            [outage.service, outage.from_s - record.calm_until_s, outage.until_s - outage.from_s]
            for outage in record.outages
        ],
        "processes": growth(record.samples),
    }


def _redis_too_large(record: Record) -> list[str]:
    limit, peak = record.redis_limit_bytes, record.redis_peak_bytes
    wrong = []
    if peak > limit + _LAST_COMMAND_BYTES:
        wrong.append(f"Redis used {peak / 2**20:.1f} MiB of {limit / 2**20:.0f} MiB")
    for sample in record.samples:
        if sample.redis.log_bytes > limit / 2:
            size = f"{sample.redis.log_bytes / 2**20:.1f} MiB of {limit / 2**20:.0f} MiB"
            wrong.append(f"minute {sample.at_min:.1f}: logs hold {size} although nothing runs")
    return wrong


def _stalled(record: Record) -> list[str]:
    wrong = [wait for wait in stalls(record) if stall_s(wait) > _LONGEST_STALL_S]
    lines = [
        f"{_GATEWAYS[wait.gateway]} stalled for {stall_s(wait):.2f} s, in which its main thread "
        f"computed for {wait.ran_s:.2f} s, asked for {wait.question} "
        f"{wait.from_s - record.calm_until_s:.1f} s after the first attack; "
        f"at work: {_attempts_around(record, wait)}"
        for wait in wrong[:_MOST_SHOWN]
    ]
    if len(wrong) > _MOST_SHOWN:
        lines.append(f"{len(wrong)} stalls of more than {_LONGEST_STALL_S:g} s in all")
    return lines


def _unanswered(record: Record) -> list[str]:
    """Questions of the probe with no answer or a wrong one."""
    faults: Counter[tuple[str, str, str]] = Counter()
    for wait in record.waits:
        if not wait.fault or _struck(record.outages, wait):
            continue
        if wait.question == "text" and _in_any(record.outages, wait.from_s, wait.until_s):
            continue  # a gateway may refuse without its engine
        faults[wait.question, _GATEWAYS[wait.gateway], wait.fault] += 1
    wrong = [
        f"{gateway} refused an honest client's {question} {count} times: {fault}"
        for (question, gateway, fault), count in faults.most_common(_MOST_SHOWN)
    ]
    wrong += [
        f"the probe asked for {question} {count} times only"
        for question, count in record.num_questions.items()
        if question == "live" and count < _FEWEST_QUESTIONS
    ]
    return wrong if record.num_questions else [*wrong, "the probe has asked nothing"]


def _answered_wrongly(record: Record) -> list[str]:
    """Attacks that broke something, and unusual clients that were refused."""
    faults: Counter[tuple[str, str, str]] = Counter()
    for attempt in record.attempts:
        is_wrong = attempt.status in _SERVERS_FAULT
        if attempt.name in _HONEST:
            is_wrong = attempt.status not in ("200", UNFINISHED)
        if is_wrong and not _in_any(record.outages, attempt.from_s, attempt.until_s):
            faults[attempt.name, attempt.status, attempt.text[:200]] += 1
    return [
        f"{name!r} was answered {status} {count} times: {text}"
        for (name, status, text), count in faults.most_common(_MOST_SHOWN)
    ]


def _not_tried(record: Record) -> list[str]:
    """Attacks that never ran, or reached no gateway: they are no evidence."""
    made = {attempt.name for attempt in record.attempts}
    wrong = [f"{name!r} was never tried" for name in record.attacks if name not in made]
    if all(attempt.status in (CLOSED, UNFINISHED) for attempt in record.attempts):
        wrong.append("no attack reached a gateway")
    return wrong


def _struck(outages: Sequence[Outage], wait: Wait) -> bool:
    """Whether a disruption to the gateway explains a wait."""
    return any(
        outage.service == _GATEWAYS[wait.gateway]
        and outage.from_s <= wait.until_s
        and wait.from_s <= outage.until_s + _AFTER_OUTAGE_S
        for outage in outages
    )


def _in_any(outages: Sequence[Outage], from_s: float, until_s: float) -> bool:
    return any(
        outage.from_s <= until_s and from_s <= outage.until_s + _AFTER_ANY_OUTAGE_S
        for outage in outages
    )


def _attempts_around(record: Record, wait: Wait) -> str:
    """Attacks that began shortly before or in a wait; the rarest, most telling ones first."""
    names = {
        attempt.name
        for attempt in record.attempts
        if wait.from_s - 1.0 <= attempt.from_s <= wait.until_s
    }
    totals = Counter(attempt.name for attempt in record.attempts)
    rare = sorted(names, key=lambda name: (totals[name], name))
    return ", ".join(rare[:_MOST_NAMED]) or "nothing"


def _first_tokens_s(record: Record) -> tuple[list[float], list[float]]:
    """Times to the probe's first tokens: undisturbed, and under attack without outages."""
    calm, hostile = [], []
    for wait in record.waits:
        if wait.question != "text" or wait.fault:
            continue
        if wait.until_s < record.calm_until_s:
            calm.append(wait.until_s - wait.from_s)
        elif not _in_any(record.outages, wait.from_s, wait.until_s):
            hostile.append(wait.until_s - wait.from_s)
    return calm, hostile


def _spread(times_s: Sequence[float]) -> dict[str, float] | None:
    if len(times_s) < 2:
        return None
    at = quantiles(times_s, n=100, method="inclusive")
    return {"p50": median(times_s), "p99": at[98], "max": max(times_s), "number": len(times_s)}
