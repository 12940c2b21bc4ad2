"""A recording gives the same plans again, byte for byte."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import BadRecording, read_frames
from scheduler_svc.replay import ReplayDiffers, replay
from shared.bus.api import EntryId
from shared.messages.requests import Abort
from tests.support.requests import submit
from tests.support.walks.recorded import CONFIG, record


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    record(path, seed=3)
    return path


@pytest.mark.parametrize("seed", range(12))
def test_the_plans_are_the_same(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, seed)
    moments = list(replay(path))
    assert [moment.step for moment in moments] == list(range(1, len(moments) + 1))
    assert len(moments) > 100
    assert moments[-1].stats.num_running <= 1
    assert any(moment.stats.num_pinned_blocks for moment in moments)


def test_what_was_recorded_before_a_field_was_new_is_the_same(
    recording: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    named = msgpack.packb("repetition_penalty") + msgpack.packb(1.0)
    neutral = msgpack.packb("temperature") + msgpack.packb(0.0)
    assert named in recording.read_bytes()
    assert neutral in recording.read_bytes()
    with older.open("wb") as file:
        for frame in msgpack.Unpacker(BytesIO(recording.read_bytes())):
            file.write(msgpack.packb(without_penalties(frame)))
    assert named not in older.read_bytes()
    assert neutral in older.read_bytes()
    assert len(list(replay(older))) == len(list(replay(recording)))


def without_penalties(part: Any) -> Any:
    """A frame or a part of it, as it was written before there were penalties."""
    if isinstance(part, bytes):
        try:
            inside = msgpack.unpackb(part)
        except ValueError:
            return part
        return msgpack.packb(without_penalties(inside)) if isinstance(inside, dict) else part
    if isinstance(part, list):
        return [without_penalties(item) for item in part]
    if isinstance(part, dict):
        new = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
        return {name: without_penalties(item) for name, item in part.items() if name not in new}
    return part


def test_a_plan_that_differs_is_found(recording: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    # Another configuration must show in the plans.
    data = recording.read_bytes().replace(b"num_blocks\x28", b"num_blocks\x29", 1)
    assert data != recording.read_bytes()
    broken.write_bytes(data)
    with pytest.raises(ReplayDiffers, match="step"):
        list(replay(broken))


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nonsense"
    path.write_bytes(b"\xc1 nonsense")
    with pytest.raises(BadRecording):
        list(replay(path))


def test_a_recording_that_was_cut_off_is_read_up_to_its_last_whole_frame(
    recording: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(recording.read_bytes()[:-1])
    assert len(list(read_frames(cut))) == len(list(read_frames(recording))) - 1


def test_the_command_prints_a_timeline(recording: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc.replay", str(recording)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "all as recorded" in done.stdout
    assert "preempted" in done.stdout


def test_an_idle_engine_that_is_sent_nonsense_collects_nothing() -> None:
    core = Scheduler(CONFIG)
    for number in range(1_000):
        core.apply(Abort("nobody", "attachment", "gone"), EntryId(5, number + 1))
        assert core.schedule(number) is None
    core.apply(submit("r0"), EntryId(5, 2_000))
    plan = core.schedule(2_000)
    assert plan is not None
    assert len(plan.idle_turns) == 1
