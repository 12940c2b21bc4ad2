"""Hostile clients beside honest ones for a few seconds; ``scripts/soak --hostile`` takes longer."""

import random
from pathlib import Path

import pytest

from tests.chaos.hostile.__main__ import chosen
from tests.chaos.hostile.attacker import CLOSED, Answer, Attacker
from tests.chaos.hostile.catalogue import ATTACKS
from tests.chaos.hostile.soak import HostileSoak, Plan

_ROUND_S = 3.0
_CHEAP = ("malformed", "random bytes", "wrong keys", "extreme numbers", "crafted salt")


async def test_honest_answers_are_those_of_an_undisturbed_run_beside_attacks(
    tmp_path: Path,
) -> None:
    plan = Plan(
        minutes=_ROUND_S / 60,
        attacks=_CHEAP,
        disrupts_services=False,
        round_s=_ROUND_S,
        num_requests=1,
    )
    soak = HostileSoak(tmp_path / "soak", plan, lambda line: None)
    await soak.run()

    record, results = soak.record, soak.report()
    assert record.honest.answered > 0
    assert (record.honest.lost, record.honest.changed, record.accidents) == ([], [], [])
    assert {attempt.name for attempt in record.attempts} == {
        attack.name for attack in chosen(_CHEAP)
    }
    assert not any(attempt.status == "500" for attempt in record.attempts)
    assert results["questions"]["live"] > 0
    assert 0 < record.redis_peak_bytes < record.redis_limit_bytes
    assert len(results["samples"]) == 1
    assert results["samples"][0]["left"] == ""


def test_every_attack_has_a_name_of_its_own_and_a_description() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(attack.attempt.__doc__ for attack in ATTACKS)


def test_an_attack_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="'trickeld' is in the name of no attack"):
        chosen(["malformed", "trickeld"])


async def test_an_attacker_without_a_gateway_finds_its_connections_closed() -> None:
    attacker = Attacker([1], "key", "127.0.0.66", random.Random(1))
    assert await attacker.request("/v1/models") == Answer(CLOSED)
