"""The interleavings of docs/RECOVERY.md, each built on purpose; the numbers are its rows.

Not reachable with one server: 8 (two primaries after a failover, which no log can mend). 25 is a
property of the worker's sampler: here everything that is computed again differs, by intention. 29
is one of its executor (tests/gpu_worker/ranks).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.bus.api import Append
from shared.bus.keys import EngineKeys
from shared.codec import decode
from shared.messages.outputs import RequestState
from shared.messages.plans import EpochStarted
from shared.sampling import BeamParams, EarlyStopping
from tests.simulation.deployment.loop import Party
from tests.simulation.deployment.world import World
from tests.simulation.profile import Manner, Profile, Wish, request
from tests.simulation.scripts import (
    Cue,
    Directed,
    also,
    crash,
    crash_gateways,
    crash_rank,
    crash_scheduler,
    delete,
    forget_last_of,
    lose_reply,
    lose_tail,
    move_clients,
    pause,
    pause_rank,
    refuse_at_rank,
    wake_worker,
)
from tests.simulation.simulate import simulate

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).read_text()
KEYS = EngineKeys("engine-0")
NUM_SEEDS = 4


def one(manner: Manner = Manner.RESUME, **changes: Any) -> Wish:
    values = {"request_id": "r0", "prompt": [1, 2, 3], "max_tokens": 12, **changes}
    after = values.pop("after", 3)
    return Wish(request(**values), manner, at_s=1.2, after=after)


def play(
    *cues: Cue,
    wishes: tuple[Wish, ...] = (),
    inspect: Callable[[World], None] | None = None,
    num_errors: int = 0,
    **changes: Any,
) -> None:
    """The same scene in several orders; no client may get wrong text."""
    for seed in range(NUM_SEEDS):
        script = Directed(*cues)
        profile = Profile(wishes=wishes or (one(),), **changes)
        run = simulate(seed, profile, script, inspect=inspect)
        assert not run.failures, f"seed {seed}: {run.failures}"
        assert not script.cues, f"seed {seed}: the scene never came: {script.cues}"
        assert run.num_errors == num_errors, f"seed {seed}: {run.num_errors} streams with errors"


RESULT = "append outputs"  # of a worker
PLAN = "plans"  # of a scheduler
START = "append plans, prompts, outputs"  # EpochStarted in all


def num_drawn(count: int) -> Callable[[World], None]:
    """So many tokens were computed, nothing twice."""

    def inspect(world: World) -> None:
        assert world.model.num_drawn == count

    return inspect


def test_row_1_an_old_worker_appends_while_a_new_scheduler_reads() -> None:
    play(Cue("worker", "before", RESULT, 4, also(crash_scheduler(), pause(0.3))))
    play(Cue("worker", "before", RESULT, 4, also(crash_scheduler(), pause(0.005))))


def test_row_1_the_last_token_is_appended_while_a_new_scheduler_reads() -> None:
    """A client that has it asks no more; one that asks for the same later must get it, too."""
    first = one(max_tokens=4)
    play(
        Cue("worker", "before", RESULT, 4, also(crash_scheduler(), pause(30.0))),
        Cue("scheduler", "before", START, 1, also(pause(0.1), wake_worker)),
        wishes=(first, replace(first, at_s=2.2, joins=True)),
    )


def test_row_2_a_worker_is_back_before_its_lease_has_run_out() -> None:
    play(Cue("worker", "before", RESULT, 4, crash(restart_s=0.01)))
    play(Cue("worker", "after", RESULT, 4, crash(restart_s=0.01)))


def test_row_3_two_processes_are_the_same_rank() -> None:
    play(Cue("worker", "before", RESULT, 4, lambda world, _: also_start(world.start_worker)))
    play(
        Cue("worker", "before", RESULT, 4, lambda world, _: also_start(world.start_worker)),
        Cue("worker", "after", RESULT, 2, pause(7.0)),
    )


def also_start(start: Callable[[], Party]) -> None:
    start()


def test_row_4_a_scheduler_wakes_and_another_has_taken_over() -> None:
    wake = also(pause(3.0), lambda world, _: also_start(world.start_scheduler))
    for retention in (3, 10_000):
        play(Cue("scheduler", "before", PLAN, 4, wake), outputs_retention=retention)
        play(Cue("scheduler", "after", PLAN, 4, wake), outputs_retention=retention)


def test_row_4_states_of_unfinished_requests_are_repeated_before_they_are_trimmed() -> None:
    """They are in the log alone."""
    everything = also(crash_scheduler(0.1), crash_gateways(0.1))
    play(
        Cue("worker", "after", RESULT, 20, everything),
        wishes=(one(max_tokens=30),),
        outputs_retention=3,
    )


@pytest.mark.parametrize("role", ["scheduler", "worker", "gateway"])
def test_row_5_the_reply_to_an_append_is_lost(role: str) -> None:
    what = {"scheduler": PLAN, "worker": RESULT, "gateway": "append requests"}[role]
    number = 1 if role == "gateway" else 4
    play(Cue(role, "after", what, number, lose_reply))


def test_row_5_appends_arrive_twice() -> None:
    play(Cue("worker", "after", RESULT, 4, lambda *_: None), repeat_rate=0.5)


@pytest.mark.parametrize("num_lost", [1, 3, 8, 30])
def test_row_6_the_log_lacks_what_was_delivered(num_lost: int) -> None:
    play(Cue("worker", "after", RESULT, 6, lose_tail(num_lost)))


def test_row_6_lost_entries_are_written_over_before_a_gateway_detects_it() -> None:
    """The gateways have started in mid-epoch; ids of entries alone show no gap."""
    for when in ("before", "after"):
        play(
            Cue("scheduler", when, "append prompts, outputs", 1, lambda *_: None),
            *[Cue("gateway", "before", "read", 1, pause(0.1)) for _ in range(2)],
            Cue("worker", "before", RESULT, 2, forget_last_of(KEYS.outputs)),
            apart_s=0.1,
        )


@pytest.mark.parametrize("num_lost", [5, 1_000])
def test_row_7_the_clock_goes_back(num_lost: int) -> None:
    play(Cue("worker", "after", RESULT, 6, lose_tail(num_lost)), max_skew_ms=60_000)


def test_row_9_a_gateway_falls_behind_the_start_of_the_log() -> None:
    wishes = tuple(one(request_id=f"r{number}", max_tokens=20) for number in range(4))
    play(Cue("gateway", "before", "read", 8, pause(0.5)), wishes=wishes, outputs_retention=3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_row_10_an_epoch_starts_in_both_logs_or_in_none(when: str) -> None:
    def inspect(world: World) -> None:
        messages = [
            decode(data) for found in world.server.entries(KEYS.outputs) for data in found.messages
        ]
        starts = [found.epoch for found in messages if isinstance(found, EpochStarted)]
        assert world.server.last_epoch(KEYS.plans) == starts[-1]

    play(
        Cue("worker", "after", RESULT, 4, crash_scheduler()),
        Cue("scheduler", when, START, 1, crash()),
        inspect=inspect,
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_row_11_the_epochs_start_is_lost_while_it_is_waited_for(when: str) -> None:
    play(
        Cue("worker", "after", RESULT, 4, crash_scheduler()),
        Cue("scheduler", "after", START, 1, lambda *_: None),
        Cue("scheduler", when, "read", 1, lose_tail(1)),
    )


def test_row_12_a_gateway_dies_before_it_can_answer_and_the_client_repeats_the_call() -> None:
    play(
        Cue("gateway", "after", "append requests", 1, crash(3.0)),
        wishes=(one(Manner.REPEAT),),
        inspect=num_drawn(12),
    )


def test_row_13_a_client_moves_and_its_old_gateway_aborts() -> None:
    for number in (1, 2, 4, 8):
        play(Cue("worker", "after", RESULT, number, move_clients), wishes=(one(Manner.REPEAT),))


def test_row_14_a_gateway_finds_a_stop_string_and_dies() -> None:
    for when in ("before", "after"):
        # Behind both Submits; the other client is there after the first has what it wanted.
        play(
            Cue("gateway", when, "append requests", 3, crash()),
            wishes=(one(Manner.STOP), one(request_id="r1")),
        )


def test_row_15_an_abort_overtakes_its_request() -> None:
    play(
        Cue("gateway", "after", "append requests", 1, lose_reply),
        wishes=(one(Manner.ABORT, after=1), one(request_id="r1")),
        repeat_rate=1.0,
    )


@pytest.mark.parametrize("log", [KEYS.plans, KEYS.outputs])
def test_row_16_an_entry_cannot_be_read(log: str) -> None:
    def spoil(world: World, _: Party) -> None:
        world.server.append_all([Append(log, [b"\xff\xff"], world.server.last_epoch(log))])

    play(Cue("worker", "after", RESULT, 4, spoil))


def test_row_17_a_request_that_kills_its_workers_ends_at_last() -> None:
    deadly = [Cue("worker", "before", RESULT, 1, crash(7.0)) for _ in range(4)]
    play(*deadly, num_errors=1)
    play(*deadly[:2], num_errors=0)


def test_row_17_restarts_of_the_server_make_no_request_suspect() -> None:
    def restart(world: World, _: Party) -> None:
        world.restart_server(0, 0.0)

    play(*[Cue("worker", "after", RESULT, 1, restart) for _ in range(3)])


@pytest.mark.parametrize("when", ["before", "after"])
def test_row_18_a_rank_dies_or_is_paused_and_the_other_waits_for_it(when: str) -> None:
    for action in (crash_rank(1), crash_rank(1, 7.0), pause_rank(1, 2.0), pause_rank(1, 30.0)):
        play(Cue("worker", when, RESULT, 4, action), num_ranks=2)
    for action in (crash(), pause(30.0)):
        play(Cue("worker", when, RESULT, 4, action), num_ranks=2)


def test_row_19_a_plan_and_the_start_of_the_next_epoch_are_read_together() -> None:
    def inspect(world: World) -> None:
        assert len(world.meeting.groups) == 1, "no rank waited in vain for another"

    for number in (1, 2, 3):
        slow = also(pause_rank(1, 0.2), crash_scheduler())
        play(Cue("scheduler", "after", PLAN, number + 1, slow), num_ranks=2, inspect=inspect)
        late = also(pause(0.2), crash_scheduler())
        play(Cue("worker", "before", "read", number + 4, late), num_ranks=3, inspect=inspect)


def test_row_20_plans_are_in_flight_when_a_worker_dies() -> None:
    for when in ("before", "after"):
        play(Cue("worker", when, RESULT, 4, crash()), max_plans_in_flight=4)


def test_row_27_results_that_cannot_be_read_come_ever_more_slowly() -> None:
    """As from a worker of another version: epochs begin, and none makes progress."""

    def spoil(world: World, party: Party, when: str, what: str) -> None:
        if when == "before" and party.role == "worker" and what == RESULT and is_spoilt(world):
            world.server.append_all([Append(KEYS.outputs, [b"\xff"], world.server.last_epoch(log))])

    def is_spoilt(world: World) -> bool:
        return world.loop.time() < 60

    def inspect(world: World) -> None:
        num_epochs = sum(found.watching.num_epochs for found in world.schedulers)
        assert 5 < num_epochs < 20

    log = KEYS.outputs
    for seed in range(NUM_SEEDS):
        run = simulate(seed, Profile(wishes=(one(),)), spoil, inspect=inspect)
        assert not run.failures, f"seed {seed}: {run.failures}"


BEAMS = one(num_choices=3, beams=BeamParams(3, 1.0, EarlyStopping.NEVER))


def test_row_21_a_beam_group_that_has_lost_its_sharing_fits_again() -> None:
    for role_crash in (crash_scheduler(), crash()):
        cue = Cue("worker", "after", RESULT, 8, role_crash)
        play(cue, wishes=(BEAMS,), num_blocks=12, max_num_sequences=3)


def test_row_22_beams_that_were_reordered_are_recovered_and_resumed() -> None:
    play(
        Cue("worker", "after", RESULT, 4, also(crash_scheduler(), move_clients)),
        Cue("worker", "before", RESULT, 3, crash()),
        wishes=(BEAMS,),
    )


def test_row_23_several_choices_are_resumed_each_at_its_place() -> None:
    for number in (2, 5, 9):
        play(
            Cue("worker", "after", RESULT, number, move_clients),
            wishes=(one(num_choices=3),),
            max_num_sequences=3,
        )


def test_row_24_handles_of_two_epochs_are_not_mixed_up() -> None:
    wishes = tuple(one(request_id=f"r{number}") for number in range(3))
    play(
        Cue("worker", "after", RESULT, 5, crash_scheduler()),
        Cue("worker", "after", RESULT, 3, crash_scheduler()),
        wishes=wishes,
    )


@pytest.mark.parametrize("log", [KEYS.outputs, KEYS.plans, KEYS.requests, ""])
def test_row_26_a_log_is_deleted_while_the_server_goes_on(log: str) -> None:
    wishes = tuple(one(request_id=f"r{number}", max_tokens=30) for number in range(3))
    for role, what in (("worker", RESULT), ("scheduler", PLAN), ("gateway", "append requests")):
        for when in ("before", "after"):
            play(Cue(role, when, what, 3, delete(log)), wishes=wishes)
    play(Cue("worker", "after", RESULT, 8, also(delete(log), crash_scheduler())), wishes=wishes)


def test_row_28_the_entry_with_the_prompt_is_lost_and_states_without_it_are_not() -> None:
    num_left = []

    def lose_prompts(world: World, _: Party) -> None:
        entries = world.server.entries(KEYS.outputs)
        kept = [entry for entry in entries if not any(map(has_prompt, entry.messages))]
        num_left.append(sum(b"RequestState" in data for e in kept for data in e.messages))
        world.server.replace(KEYS.outputs, kept)

    def has_prompt(data: bytes) -> bool:
        found = decode(data)
        return isinstance(found, RequestState) and not found.submit.lacks_prompt

    play(
        Cue("worker", "after", RESULT, 4, move_clients),
        Cue("worker", "after", RESULT, 40, also(lose_prompts, crash_scheduler())),
        wishes=(one(max_tokens=60),),
    )
    assert all(num_left), "a state without the prompt is left"


def test_row_30_a_rank_is_back_before_the_others_have_left_its_group() -> None:
    def inspect(world: World) -> None:
        first, *later = world.meeting.groups.values()
        assert first.num_steps
        assert any(group.num_steps for group in later)

    for crashes in ((crash_rank(1, 0.0),), (crash_rank(1, 0.0), crash_rank(2, 0.0))):
        play(Cue("worker", "after", RESULT, 4, also(*crashes)), num_ranks=3, inspect=inspect)


def test_row_31_one_rank_alone_refuses_a_plan() -> None:
    for number in (0, 1):
        play(Cue("worker", "after", RESULT, 4, refuse_at_rank(number)), num_ranks=2)


def test_every_row_of_the_catalogue_is_a_scene_but_those_that_cannot_be() -> None:
    catalogue = (ROOT / "docs" / "RECOVERY.md").read_text()
    rows = {int(found) for found in re.findall(r"^\| (\d+) \|", catalogue, re.MULTILINE)}
    scenes = {int(found) for found in re.findall(r"^def test_row_(\d+)_", SOURCE, re.MULTILINE)}
    assert rows == scenes | {8, 25, 29}
