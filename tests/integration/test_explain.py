"""Explained requests of a real engine with a small pool, whose worker stops at work."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.explain.log_sources import from_bus, from_recording
from scheduler_svc.explain.merged_logs import Logs, timeline_of
from scheduler_svc.explain.timeline import Kind, Timeline
from scheduler_svc.recording import FileRecorder
from shared.bus.api import Bus
from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from tests.integration.configurations import Configuration
from tests.support.engine import DEADLINE_S, Engine, running_scheduler, running_worker
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scheduler_svc.explain"]
NUM_TOKENS = 40
NUM_REQUESTS = 6
SMALL = Configuration(
    block_size=4, pool_tokens=200, max_num_batched_tokens=48, preemption="swap", host_tokens=100
)


def requests() -> list[Submit]:
    """Together they need more than twice the pool."""
    rng = np.random.default_rng(5)
    return [
        submit(
            f"request-{number}",
            rng.integers(3, VOCAB_SIZE, 30).tolist(),
            num_choices=1 + number % 2,
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=number,
            ignore_eos=True,
        )
        for number in range(NUM_REQUESTS)
    ]


async def serve(bus: Bus, model: Path, recording: Path) -> tuple[Engine, str]:
    """All requests finished, in two epochs; the engine and its id."""
    scheduler = SMALL.scheduler()
    with closing(FileRecorder(recording)) as recorder:
        async with running_scheduler(bus, scheduler, recorder) as metrics:
            engine = Engine(bus, scheduler.engine_id, metrics)
            async with running_worker(bus, SMALL.worker(model), scheduler.engine_id):
                asked = asyncio.create_task(engine.generate(requests()))
                async with asyncio.timeout(DEADLINE_S):
                    while engine.num_preemptions() < 2:
                        await asyncio.sleep(0.01)
            async with running_worker(bus, SMALL.worker(model), scheduler.engine_id):
                await asked
                await engine.until_idle()
    return engine, scheduler.engine_id


def stories(logs: Logs) -> list[Timeline]:
    return [timeline_of(request.request_id, logs) for request in requests()]


def preemptions(timelines: Sequence[Timeline]) -> list[tuple[str, object]]:
    return [
        (timeline.request_id, event.facts["step"])
        for timeline in timelines
        for event in timeline.events
        if event.kind == Kind.PREEMPTED
    ]


def check(timeline: Timeline) -> None:
    """Whatever else happened, the frame of a life is there, in its order."""
    kinds = [event.kind for event in timeline.events]
    frame = [Kind.SUBMITTED, Kind.ACCEPTED, Kind.EPOCH, Kind.TAKEN_OVER, Kind.ENDED]
    assert [kind for kind in kinds if kind in frame] == frame
    assert kinds.count(Kind.FIRST_TOKEN) == 1
    assert kinds[-1] == Kind.ENDED
    ended = timeline.events[-1]
    assert ended.facts["reason"] == "length"
    assert set(ended.facts["num_tokens"]) == {NUM_TOKENS}
    times = [event.when.at_ms for event in timeline.events]
    assert times[-1] > times[0]


async def test_the_logs_and_a_recording_show_preemptions_and_a_worker_that_ended(
    llama: Path, redis_bus: RedisBus, redis_url: str, tmp_path: Path
) -> None:
    recording = tmp_path / "recording"
    engine, engine_id = await serve(redis_bus, llama, recording)
    logged, replayed = await from_bus(redis_bus, engine_id), from_recording(recording)
    kept, exact = stories(logged), stories(replayed)
    deduced = stories(replace(logged, plans=[]))
    for timeline in (*kept, *deduced, *exact):
        check(timeline)
    assert len(preemptions(exact)) == engine.num_preemptions()
    assert preemptions(kept) == preemptions(exact)
    # Without plans a preemption shows only where something was computed of the request before; of
    # one whose prompt was being computed not even the step is known.
    known = set(preemptions(exact))
    some_step = {(request_id, None) for request_id, _ in known}
    assert set(preemptions(deduced)) <= known | some_step
    assert preemptions(deduced)
    whom = {
        event.facts["by"][0]
        for timeline in exact
        for event in timeline.events
        if "by" in event.facts
    }
    assert whom <= {request.request_id for request in requests()}
    check_commands(redis_url, engine_id, recording)


def check_commands(redis_url: str, engine_id: str, recording: Path) -> None:
    """The same from the command line."""
    from_redis = ("--redis-url", redis_url, "--engine-id", engine_id)
    lines = explain("request-1", *from_redis)
    assert "taken over with" in lines
    assert "plan is trimmed" in lines or "plans before step" in lines
    value = json.loads(explain("request-1", "--json", "--recording", str(recording)))
    assert value["request_id"] == "request-1"
    assert value["events"][-1]["kind"] == "ended"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        explain("request", *from_redis)
    assert failed.value.returncode == 1
    assert "6 requests begin with 'request'" in failed.value.stderr
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        to_nobody = subprocess.run(
            [*COMMAND, "request-1", *from_redis],
            cwd=ROOT,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (to_nobody.returncode, to_nobody.stderr) == (0, "")


def explain(*arguments: str) -> str:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
