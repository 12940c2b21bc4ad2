"""The past over HTTP: stretches, explanations and reruns, worked out by a process of its own."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shared.bus.memory import MemoryBus
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.ui.logged_engine import LoggedEngine
from tests.support.requests import submit

HEADERS = {"authorization": "Bearer key-of-me-123456"}


@pytest.fixture
async def stage(make_stage: MakeStage, tmp_path: Path) -> Stage:
    """A gateway beside the logs of an engine whose requests displaced each other."""
    bus = MemoryBus(lambda: 1_000)
    keys = tmp_path / "keys"
    keys.write_text(f"me sha256:{hashlib.sha256(b'key-of-me-123456').hexdigest()}\n")
    stage = await make_stage(bus=bus, api_keys=str(keys))
    logged = LoggedEngine(bus, 5_000_000, num_blocks=10, num_host_blocks=0)
    engine = logged.engine
    engine.snapshot()
    for number in range(6):
        tenant = "me" if number % 2 else "you"
        engine.ask(submit(f"request{number}", [number + 1] * 9, max_tokens=15, tenant=tenant))
        engine.step()
    while engine.step():
        pass
    engine.snapshot()
    await logged.write()
    return stage


async def asked(stage: Stage, path: str, **params: Any) -> Any:
    answer = await stage.http.get(f"/ui/{path}", params=params, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_past_is_shown_explained_and_run_again(stage: Stage) -> None:
    span = await asked(stage, "past")
    assert span["first_ms"] == 5_000_001
    until_ms = span["last_ms"]
    found = await asked(stage, "past/stretch", since_ms=span["first_ms"], until_ms=until_ms)
    marks = [mark for frame in found["frames"] for mark in frame.get("marks", ())]
    assert any("lost" in mark[4] for mark in marks if mark[0] == "preempted")
    names = dict(found["names"])
    assert set(names.values()) == {"request1", "request3", "request5"}, "those of the own key"

    number = next(mark[3] for mark in marks if mark[0] == "preempted" and mark[3] in names)
    told = await asked(stage, "past/explain", request=number)
    texts = " ".join(text for _, _, text in told["events"])
    assert "accepted" in texts
    assert "preempted by" in texts
    assert "needed a block, 0 were free" in texts
    assert not any(f"request{other}" in texts for other in (0, 2, 4)), "others have numbers"
    foreign = min(set(range(1_001, 1_010)) - set(names))
    call = f"/ui/past/explain?request={foreign}"
    check_error(await stage.http.get(call, headers=HEADERS), 404)

    rerun = await asked(
        stage, "past/rerun", since_ms=span["first_ms"], until_ms=until_ms, num_blocks=60
    )
    assert rerun["before"]["num_preemptions"] > rerun["after"]["num_preemptions"] == 0


async def test_bad_questions_are_refused_by_name_and_a_key_is_required(stage: Stage) -> None:
    check_error(await stage.http.get("/ui/past"), 401)
    for query, param in (
        ("past/stretch?since_ms=x&until_ms=1", "since_ms"),
        ("past/stretch?since_ms=5&until_ms=1", "until_ms"),
        ("past/rerun?since_ms=1&until_ms=2&num_blocks=0", "num_blocks"),
        ("past/rerun?since_ms=1&until_ms=2&preemption=none", "preemption"),
        ("past/explain?request=%D9%A3", "request"),
    ):
        check_error(await stage.http.get(f"/ui/{query}", headers=HEADERS), 400, param)
