"""Stretches of the past, and what would have been with other settings."""

import json

import pytest

from scheduler_svc.past.child import answer
from scheduler_svc.past.rerun import what_if
from scheduler_svc.past.stretch import StretchLogs, frames_of
from scheduler_svc.past.workload import workload_of
from shared.codec import decode_as
from shared.messages.snapshots import PoolSnapshot
from tests.support.requests import submit
from tests.support.viewed_engine import ViewedEngine

END_MS = 5_000  # after all steps


@pytest.fixture
def engine() -> ViewedEngine:
    """An engine of few blocks, in which requests displaced each other."""
    found = ViewedEngine(num_blocks=10, num_host_blocks=0)
    found.snapshot()
    for number in range(6):
        found.ask(submit(f"r{number}", [number + 1] * 9, max_tokens=15, tenant="me"))
        found.step()
    while found.step():
        pass
    found.snapshot()
    return found


def logs_of(engine: ViewedEngine) -> StretchLogs:
    return StretchLogs(engine.snapshots, engine.plans, engine.outputs)


def number_of(name: str) -> int:
    return int(name[1:]) + 1


def test_a_stretch_begins_as_it_was_and_ends_as_the_engine_is(engine: ViewedEngine) -> None:
    found = frames_of(logs_of(engine), number_of, 1_000, END_MS)
    assert found["snapshot"]["counts"][0] == 0
    marks = [mark for frame in found["frames"] for mark in frame.get("marks", ())]
    preempted = [mark for mark in marks if mark[0] == "preempted"]
    assert len(preempted) == sum(
        event.request_id.startswith("r")
        for event in engine.core.take_events()
        if type(event).__name__ == "Preempted"
    )
    assert preempted
    assert "is the last running request by rank" in preempted[0][4]
    counts = [frame["counts"] for frame in found["frames"] if "counts" in frame]
    assert counts[-1][0] == engine.core.stats().num_used_blocks == 0
    assert found["names"][:2] == [[1, "r0", "me"], [2, "r1", "me"]]


def test_a_stretch_of_an_hour_has_no_more_frames_than_one_of_seconds(engine: ViewedEngine) -> None:
    found = frames_of(logs_of(engine), number_of, 1_000, 1_000 + 3_600_000)
    assert len(found["frames"]) <= 2
    assert found["snapshot"]["step"] == 0


def test_more_blocks_would_have_preempted_none(engine: ViewedEngine) -> None:
    snapshot = decode_as(PoolSnapshot, engine.snapshots[0].messages[0])
    workload = workload_of(logs_of(engine), END_MS)
    assert [one.submit.request_id for one in workload.requests] == [f"r{n}" for n in range(6)]
    found = what_if(json.loads(snapshot.settings), {"num_blocks": 60}, workload, (1_000, 1_000_000))
    assert found["before"]["num_preemptions"] > 0
    assert found["after"]["num_preemptions"] == 0
    assert found["after"]["num_tokens"] == found["before"]["num_tokens"] > 0
    assert found["after"]["num_left"] == found["before"]["num_left"] == 0
    assert found["num_preemptions"] > 0
    most = max(point[1] for point in found["after"]["points"])
    assert most > 10, "it uses the blocks that there were not"


def test_settings_that_are_impossible_and_a_past_that_is_gone_are_errors(
    engine: ViewedEngine,
) -> None:
    packed = [[str(entry.id), list(entry.messages)] for entry in engine.snapshots]
    question = {
        "name": "rerun",
        "logs": {"snapshots": packed, "plans": [], "outputs": []},
        "since_ms": 0,
        "until_ms": 10,
        "changes": {"max_num_batched_tokens": 1},
    }
    with pytest.raises(ValueError, match="max_num_batched_tokens=1"):
        answer(question, number_of)
    with pytest.raises(ValueError, match="do not reach back"):
        answer(question | {"logs": {}}, number_of)
