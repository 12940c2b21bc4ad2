"""Recordings in the page's time machine: those of one folder, by name, and none of their texts."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.bus.memory import MemoryBus
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.support.requests import submit
from tests.support.walks.recorded import CONFIG, Recorded

HEADERS = {"authorization": "Bearer key-of-me-123456"}


def record(path: Path) -> None:
    """Record an engine whose requests displaced each other."""
    engine = Recorded(path)
    for number in range(10):
        tenant = "me" if number % 2 else "you"
        prompt = [number + 1] * 30
        engine.give("requests", submit(f"request{number}", prompt, max_tokens=60, tenant=tenant))
        engine.schedule()
        execute(engine)
    while engine.plans:
        execute(engine)
        engine.schedule()
    engine.recorder.close()


def execute(engine: Recorded) -> None:
    """Execute the oldest plan in some milliseconds of the engine's clock."""
    result = engine.worker.execute(engine.plans.popleft())
    engine.give("outputs", replace(result, step_us=4_000))


@pytest.fixture
async def stage(make_stage: MakeStage, tmp_path: Path) -> Stage:
    folder = tmp_path / "recordings"
    folder.mkdir()
    record(folder / "busy")
    data = (folder / "busy").read_bytes()
    cut = len(data) // 3
    (folder / "damaged").write_bytes(data[:cut] + b"\xc1" * 9 + data[cut:])
    other = data.replace(b"num_blocks" + bytes([CONFIG.num_blocks]), b"num_blocks\x29", 1)
    (folder / "differs").write_bytes(other)
    (folder / "nonsense").write_text("no recording")
    (folder / "folder").mkdir()
    (tmp_path / "secret").write_bytes(data)
    (folder / "link").symlink_to(tmp_path / "secret")
    keys = tmp_path / "keys"
    keys.write_text(f"me sha256:{hashlib.sha256(b'key-of-me-123456').hexdigest()}\n")
    bus = MemoryBus(lambda: 1_000)
    return await make_stage(bus=bus, api_keys=str(keys), ui_recordings=str(folder))


async def asked(stage: Stage, path: str, **params: Any) -> Any:
    answer = await stage.http.get(f"/ui/{path}", params=params, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_recording_is_listed_shown_and_run_again_with_other_settings(stage: Stage) -> None:
    check_error(await stage.http.get("/ui/past/recordings"), 401)
    listed = {file["name"]: file for file in await asked(stage, "past/recordings")}
    assert listed.keys() == {"busy", "damaged", "differs", "nonsense"}
    busy, damaged = listed["busy"], listed["damaged"]
    assert busy["bytes"] > 1_000
    assert not busy["is_damaged"]
    assert busy["first_ms"] == 5
    assert damaged["is_damaged"]
    assert damaged["last_ms"] < busy["last_ms"]
    assert listed["nonsense"].get("first_ms") is None

    span = {"since_ms": 5, "until_ms": busy["last_ms"], "recording": "busy"}
    found = await asked(stage, "past/stretch", **span)
    marks = [mark for frame in found["frames"] for mark in frame.get("marks", ())]
    assert any("lost" in mark[4] for mark in marks if mark[0] == "preempted")
    assert found["snapshot"]["num_blocks"] == CONFIG.num_blocks
    assert found["frames"][-1]["counts"][0] == 0, "no block is in use at its end"
    assert found["problem"] == ""
    names = {name for _, name in found["names"]}
    assert names == {f"request{number}" for number in range(1, 10, 2)}, "those of the own key"

    later = {**span, "since_ms": busy["last_ms"] // 2}
    middle = await asked(stage, "past/stretch", **later)
    assert middle["snapshot"]["counts"][0] > 0, "the replay has reached the middle"

    rerun = await asked(stage, "past/rerun", **span, num_blocks=400)
    assert rerun["num_requests"] == 10
    assert rerun["before"]["num_preemptions"] > rerun["after"]["num_preemptions"] == 0


async def test_what_is_left_of_a_damaged_recording_is_shown_with_the_reason(stage: Stage) -> None:
    span = {"since_ms": 5, "until_ms": 1_000}
    found = await asked(stage, "past/stretch", **span, recording="damaged")
    assert found["frames"]
    assert "damaged" in found["problem"]
    for name, path in (("nonsense", "past"), ("differs", "past/stretch")):
        params = {**span, "recording": name}
        answer = await stage.http.get(f"/ui/{path}", params=params, headers=HEADERS)
        if name == "nonsense":
            check_error(answer, 400)
        assert "tokens=" not in answer.text, "plans have prompts"
        assert "damaged" in answer.text


async def test_only_files_of_the_folder_can_be_named(stage: Stage) -> None:
    for name, status in (
        ("../secret", 400),
        ("..", 400),
        ("", 400),
        ("/etc/passwd", 400),
        ("a\\b", 400),
        ("busy\0", 400),
        ("x" * 300, 400),
        ("none", 404),
        ("folder", 404),
        ("link", 404),
    ):
        for path in ("past", "past/stretch"):
            params = {"recording": name, "since_ms": 1, "until_ms": 2}
            answer = await stage.http.get(f"/ui/{path}", params=params, headers=HEADERS)
            error = check_error(answer, status, "recording")
            assert repr(name)[:20] in error["message"]


async def test_without_a_folder_there_are_no_recordings(make_stage: MakeStage) -> None:
    stage = await make_stage()
    assert (await stage.http.get("/ui/past/recordings")).json() == []
    check_error(await stage.http.get("/ui/past?recording=busy"), 404, "recording")
