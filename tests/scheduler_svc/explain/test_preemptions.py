"""Preemptions in a timeline: those of plans, and what follows from results where plans are gone."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_svc.explain.log_sources import from_recording
from scheduler_svc.explain.merged_logs import (
    Logs,
    Planned,
    timeline_of,
)
from scheduler_svc.explain.timeline import Event, Kind, Timeline
from shared.messages.plans import PlannedPreemption
from shared.sampling import BeamParams
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


def test_a_plan_has_the_preemption_and_why_it_was_made() -> None:
    lives = outputs(
        STARTED,
        state("b", 1),
        state("a", 2),
        result(1, 1, 2, admitted={1: 0, 2: 0}),
        result(2, 1),
    )
    lost = PlannedPreemption("a", "b", "swap", 17, 5, 0, 9)
    plans = [
        Planned(EPOCH, plan(1, EPOCH + 40)),
        Planned(EPOCH, plan(2, EPOCH + 50, retired=ints(2), preemptions=(lost,))),
    ]
    found = only(explained(Logs(plans=plans, outputs=lives)), Kind.PREEMPTED)
    assert found.text == (
        "preempted by b in step 2 (swap): it lost 5 blocks with 17 tokens: b needed a block, 0 "
        "were free, and this request is the last running request by rank; the host pool keeps its "
        "blocks (9 were free there)"
    )
    assert (found.facts["by"], found.facts["preemption"]) == (["b"], "swap")
    assert (found.when.at_ms, found.when.is_estimate) == (EPOCH + 50, False)


def test_a_request_that_a_plan_alone_names_is_a_request_of_the_logs() -> None:
    lost = PlannedPreemption("a", "of another key", "recompute", 17, 5, 0, 0)
    logs = Logs(plans=[Planned(EPOCH, plan(1, EPOCH, preemptions=(lost,)))])
    assert logs.request_ids() == {"a", "of another key"}


def test_preemptions_of_a_beam_search_are_unknown_where_a_plan_is_gone() -> None:
    asks = submit("a", num_choices=2, beams=BeamParams(2, 1.0, "never"))
    lives = outputs(STARTED, state(asks, 1), result(1, admitted={1: 0}, beams=[1]), result(2))
    plans = [Planned(EPOCH, plan(step, EPOCH + step)) for step in (1, 2)]
    for kept, is_unknown in ((plans, False), (plans[:1], True)):
        unknown = explained(Logs(plans=kept, outputs=lives)).unknown
        assert any("preemptions of a beam search" in what for what in unknown) == is_unknown


@pytest.mark.parametrize("seed", range(2))
def test_what_follows_from_results_is_what_plans_show(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, seed)
    logs = from_recording(path)
    bare = replace(logs, plans=[])
    num_exact = 0
    noted = {lost.request_id for found in logs.plans for lost in found.plan.preemptions}
    others = sorted(logs.request_ids() - noted)[:10]
    for request_id in (*sorted(noted), *others):
        exact = preemptions(timeline_of(request_id, logs))
        num_exact += len(exact)
        steps = {event.facts["step"] for event in preemptions(timeline_of(request_id, bare))}
        assert steps <= {*(event.facts["step"] for event in exact), None}
    assert num_exact > 0


def preemptions(timeline: Timeline) -> list[Event]:
    """Those that mattered: not those of groups whose end was not read yet."""
    ended = [n for n, event in enumerate(timeline.events) if event.kind == Kind.ENDED]
    until = ended[0] if ended else len(timeline.events)
    return [event for event in timeline.events[:until] if event.kind == Kind.PREEMPTED]
