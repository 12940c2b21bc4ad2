"""The faults that a hostile soak reports, and what it tolerates."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.serving.processes import Held, Kept
from tests.chaos.disruptor import Outage
from tests.chaos.hostile.attacker import CLOSED, SILENT
from tests.chaos.hostile.honest import Honesty
from tests.chaos.hostile.verdict import Attempt, Record, found, report
from tests.chaos.probe import Wait
from tests.chaos.soak.verdict import Sample

MIB = 2**20
HOSTILE, UNUSUAL = "deep JSON", "half-closed"


def sample(minute: int, used_mib: float = 8, log_mib: float = 4, num_keys: int = 6) -> Sample:
    redis = Kept(int(used_mib * MIB), 5, 3, 500, num_keys, int(log_mib * MIB))
    processes = {"worker": Held(7, 400 * MIB, num_fds=15, num_threads=3)}
    return Sample(float(minute), processes, redis, 1.0, "")


def wait(
    question: str = "live", at_s: float = 50.0, waited_s: float = 0.5, fault: str = ""
) -> Wait:
    return Wait(question, 0, at_s, at_s + waited_s, 0.25, queued_s=0.0, late_s=0.0, fault=fault)


def attempt(name: str = HOSTILE, status: str = "400", at_s: float = 50.0) -> Attempt:
    return Attempt(name, at_s, at_s + 0.1, status, "")


@pytest.fixture
def record() -> Record:
    """A run in which nothing is wrong."""
    return Record(
        attacks=[HOSTILE, UNUSUAL],
        outputs_retention=10_000,
        redis_limit_bytes=256 * MIB,
        samples=[sample(minute) for minute in range(8)],
        waits=[wait(), wait("text", 10.0, 0.2), wait("text", 11.0, 0.3), wait("text", waited_s=9)],
        num_questions={"live": 5_000, "models": 1_000, "text": 100},
        attempts=[attempt(), attempt(status=CLOSED), attempt(UNUSUAL, "200")],
        honest=Honesty(answered=100),
        calm_until_s=20.0,
        redis_peak_bytes=200 * MIB,
    )


def test_a_run_in_which_nothing_changed_is_good(record: Record) -> None:
    assert found(record) == []


def test_a_gateway_that_does_not_answer_has_stalled(record: Record) -> None:
    record.waits.append(wait(at_s=49.5, waited_s=1.4))
    [line] = found(record)
    assert line.startswith("gateway-1 stalled for 1.40 s, in which its main thread computed")
    assert "0.25 s, asked for live 29.5 s after the first attack" in line
    assert line.endswith("at work: half-closed, deep JSON")


@pytest.mark.parametrize("whose", ["queued_s", "late_s"])
def test_a_wait_for_a_core_is_no_stall(record: Record, whose: str) -> None:
    longer: dict[str, Any] = {whose: 0.6}
    record.waits.append(replace(wait(waited_s=1.4), **longer))
    assert found(record) == []


def test_a_gateway_that_was_killed_may_be_unreachable_for_a_while(record: Record) -> None:
    record.waits.append(wait(at_s=60.0, waited_s=4.0, fault="no connection"))
    assert len(found(record)) == 2
    record.outages.append(Outage("gateway-2", 59.0, 64.0))
    assert len(found(record)) == 2
    record.outages.append(Outage("gateway-1", 59.0, 64.0))
    assert found(record) == []


def test_a_refusal_of_an_honest_client_is_a_fault(record: Record) -> None:
    record.waits += [wait("models", fault="status 429"), wait("models", fault="status 429")]
    [line] = found(record)
    assert line == "gateway-1 refused an honest client's models 2 times: status 429"


def test_an_engine_that_was_killed_may_be_missing_for_a_while(record: Record) -> None:
    record.waits.append(wait("text", 60.0, fault="status 503"))
    assert len(found(record)) == 1
    record.outages.append(Outage("worker", 50.0, 52.0))
    assert found(record) == []


def test_an_attack_that_breaks_something_is_a_fault(record: Record) -> None:
    record.attempts.append(attempt(status="500"))
    assert found(record) == ["'deep JSON' was answered 500 1 times: "]


@pytest.mark.parametrize("status", ["400", CLOSED, SILENT])
def test_a_client_that_is_only_unusual_must_be_served(record: Record, status: str) -> None:
    record.attempts.append(attempt(UNUSUAL, status, at_s=70.0))
    assert found(record) == [f"'half-closed' was answered {status} 1 times: "]
    record.outages.append(Outage("redis", 70.0, 71.0))
    assert found(record) == []


def test_an_attack_that_was_not_made_proves_nothing(record: Record) -> None:
    record.attempts = [attempt(UNUSUAL, CLOSED)]
    assert {"'deep JSON' was never tried", "no attack reached a gateway"} <= set(found(record))


def test_a_probe_with_few_requests_proves_nothing(record: Record) -> None:
    record.num_questions = {"live": 20, "models": 5}
    assert found(record) == ["the probe asked for live 20 times only"]
    record.num_questions = {}
    assert found(record) == ["the probe has asked nothing"]


@pytest.mark.parametrize("what", ["lost", "changed"])
def test_an_answer_that_is_lost_or_changed_is_a_fault(record: Record, what: str) -> None:
    getattr(record.honest, what).append("0-c1r2: [DONE] came too early")
    assert found(record) == [f"an answer was {what}: 0-c1r2: [DONE] came too early"]


def test_redis_beyond_its_limit_is_a_fault(record: Record) -> None:
    record.redis_peak_bytes = 258 * MIB
    assert found(record) == ["Redis used 258.0 MiB of 256 MiB"]


def test_logs_that_take_most_of_redis_are_a_fault(record: Record) -> None:
    record.samples[5] = sample(5, log_mib=130)
    assert found(record) == [
        "minute 5.0: logs hold 130.0 MiB of 256 MiB although nothing runs",
    ]


def test_ever_more_keys_are_a_leak(record: Record) -> None:
    record.samples = [sample(minute, num_keys=6 + 10 * minute) for minute in range(9)]
    assert found(record)[0].startswith("Redis has ever more keys: [6, 16, 26")


def test_a_report_separates_first_tokens_undisturbed_and_under_attack(record: Record) -> None:
    record.outages.append(Outage("worker", 200.0, 210.0))
    record.waits += [wait("text", 60.0, 11.0), wait("text", 205.0, 30.0)]
    times = report(record)["first_token_s"]
    assert times["undisturbed"]["max"] == pytest.approx(0.3)
    assert times["attacked"]["max"] == pytest.approx(11.0)
    assert report(record)["attacks"] == {
        HOSTILE: {"400": 1, CLOSED: 1},
        UNUSUAL: {"200": 1},
    }
