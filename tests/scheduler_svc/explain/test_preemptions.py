"""Preemptions in a timeline: what is certain, and what is logged not to be."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_svc.core.events import Preempted
from scheduler_svc.explain.log_sources import from_recording
from scheduler_svc.explain.merged_logs import (
    Logs,
    Planned,
    timeline_of,
)
from scheduler_svc.explain.request_tracker import UNNAMED
from scheduler_svc.explain.timeline import Event, Kind, Timeline
from tests.scheduler_svc.explain.handmade_logs import (
    EPOCH,
    STARTED,
    explained,
    ints,
    kinds,
    only,
    outputs,
    plan,
    result,
    state,
)
from tests.support.requests import submit
from tests.support.walks.recorded import record


def test_a_missing_row_is_a_preemption_whose_kind_follows_from_the_next_admission() -> None:
    lives = outputs(
        STARTED,
        state(submit("a", [1] * 9), 1),
        result(1, 1, admitted={1: 0}),
        result(2, 1),
        result(3),
        result(4),
        result(5, 1, admitted={1: 8}),
        result(6, 1),
    )
    timeline = explained(Logs(outputs=lives, block_size=4))
    assert kinds(timeline)[-3:] == ["preempted", "admitted again", "resumed"]
    lost, back = only(timeline, Kind.PREEMPTED), only(timeline, Kind.ADMITTED_AGAIN)
    assert (lost.facts["step"], lost.facts["by"], lost.facts["num_tokens"]) == (3, None, 11)
    assert (back.facts["num_tokens"], back.facts["num_reused"]) == (11, 8)
    assert "recompute" in back.text
    assert timeline.status == "it is running, 4 tokens generated"


@pytest.mark.parametrize(
    ("block_size", "words"), [(4, "(swap)"), (5, "not certain"), (None, "not")]
)
def test_what_comes_back_whole_was_swapped_if_the_cache_cannot_have_had_it(
    block_size: int | None, words: str
) -> None:
    lives = outputs(
        STARTED,
        state(submit("a", [1] * 9), 1),
        result(1, 1, admitted={1: 0}),
        result(2, 1),
        result(3),
        result(4, 1, admitted={1: 10}),
    )
    timeline = explained(Logs(outputs=lives, block_size=block_size))
    assert words in only(timeline, Kind.ADMITTED_AGAIN).text


def test_a_preemption_while_the_prompt_is_computed_shows_in_a_second_admission() -> None:
    lives = outputs(
        STARTED, state("a", 1), result(1, admitted={1: 0}), result(2), result(3, admitted={1: 0})
    )
    timeline = explained(Logs(outputs=lives))
    assert "between steps 1 and 3" in only(timeline, Kind.PREEMPTED).text


def test_a_plan_shows_which_request_needed_the_blocks() -> None:
    lives = outputs(
        STARTED,
        state("b", 1),
        state("a", 2),
        result(1, 1, 2, admitted={1: 0, 2: 0}),
        result(2, 1),
    )
    plans = [
        Planned(EPOCH, plan(1, EPOCH + 40)),
        Planned(EPOCH, plan(2, EPOCH + 50, retired=ints(2), grown_handles=ints(1))),
    ]
    # With blocks of 2 it needs none itself: 4 tokens, of which the last is to be computed.
    lost = only(explained(Logs(plans=plans, outputs=lives, block_size=2)), Kind.PREEMPTED)
    assert (lost.facts["by"], lost.facts["preemption"]) == (["b"], "recompute")
    lost = only(explained(Logs(plans=plans, outputs=lives, block_size=3)), Kind.PREEMPTED)
    assert lost.facts["by"] == ["a", "b"]
    assert (lost.when.at_ms, lost.when.is_estimate) == (EPOCH + 50, False)


def test_a_replayed_plan_shows_preemptions_exactly() -> None:
    lives = outputs(STARTED, state("a", 2), result(1, 2, admitted={2: 0}), result(2))
    plans = [
        Planned(EPOCH, plan(1, EPOCH + 40), ()),
        Planned(EPOCH, plan(2, EPOCH + 50), (Preempted("a", "b", "swap", 17),)),
    ]
    lost = only(explained(Logs(plans=plans, outputs=lives)), Kind.PREEMPTED)
    assert (lost.facts["by"], lost.facts["preemption"], lost.facts["num_tokens"]) == (
        ["b"],
        "swap",
        17,
    )


@pytest.mark.parametrize("seed", range(2))
def test_what_is_deduced_is_what_a_replay_shows(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, seed)
    logs = from_recording(path)
    assert all(found.preemptions is not None for found in logs.plans)
    plans = [Planned(found.epoch, found.plan) for found in logs.plans]
    with_plans, bare = replace(logs, plans=plans), replace(logs, plans=[])
    num_exact = num_certain = 0
    noted = {event.request_id for found in logs.plans for event in found.preemptions or ()}
    others = sorted(logs.request_ids() - noted)[:10]
    for request_id in (*sorted(noted), *others):
        exact = preemptions(timeline_of(request_id, logs))
        num_exact += len(exact)
        deduced = preemptions(timeline_of(request_id, with_plans))
        assert [event.facts["step"] for event in deduced] == [e.facts["step"] for e in exact]
        for known, found in zip(exact, deduced, strict=True):
            assert known.facts["by"][0] in found.facts["by"] or UNNAMED in found.facts["by"]
            assert found.facts["preemption"] in (None, known.facts["preemption"])
            num_certain += len(found.facts["by"]) == 1
        steps = {event.facts["step"] for event in preemptions(timeline_of(request_id, bare))}
        assert steps <= {*(event.facts["step"] for event in exact), None}
    assert num_exact > 0
    assert num_certain > 0


def preemptions(timeline: Timeline) -> list[Event]:
    """Those that mattered: not those of groups whose end was not read yet."""
    ended = [n for n, event in enumerate(timeline.events) if event.kind == Kind.ENDED]
    until = ended[0] if ended else len(timeline.events)
    return [event for event in timeline.events[:until] if event.kind == Kind.PREEMPTED]
