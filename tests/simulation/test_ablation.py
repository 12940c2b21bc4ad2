"""Every rule of the protocol is needed: without it, runs fail that do not fail with it."""

from collections.abc import Callable
from unittest.mock import patch

import pytest

from scheduler_svc.core.sequences.backlog import Backlog
from shared.messages.requests import Submit
from tests.simulation import test_recovery_rows as rows
from tests.simulation.ablation import RULES, failing, without
from tests.simulation.profile import Manner, Profile, Wish, request
from tests.simulation.simulate import simulate

MOST_SEEDS = 400

ROWS: dict[str, Callable[[], None]] = {
    "F1 stale writers are refused": (
        rows.test_row_1_an_old_worker_appends_while_a_new_scheduler_reads
    ),
    "F2 fence, then replay": (
        rows.test_row_1_the_last_token_is_appended_while_a_new_scheduler_reads
    ),
    "F3 only named instances act": rows.test_row_3_two_processes_are_the_same_rank,
    "F4 RequestState is a compare-and-append": rows.test_row_15_an_abort_overtakes_its_request,
    "F4 RequestState before trimming": (
        rows.test_row_4_states_of_unfinished_requests_are_repeated_before_they_are_trimmed
    ),
    "F5 the client's view wins": lambda: rows.test_row_6_the_log_lacks_what_was_delivered(8),
    "F5 Attach where the log is lost": lambda: rows.test_row_6_the_log_lacks_what_was_delivered(8),
    "F6 steps are dense": (
        rows.test_row_6_lost_entries_are_written_over_before_a_gateway_detects_it
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_some_run_fails(rule: str) -> None:
    for seed in range(MOST_SEEDS):
        if failing(rule, [seed]):
            assert not failing(None, [seed], rule), f"seed {seed} fails with the rule, too"
            return
    pytest.fail(f"none of {MOST_SEEDS} runs fails without it")


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_its_row_of_the_catalogue_fails(rule: str) -> None:
    with without(rule), pytest.raises(AssertionError):
        ROWS[rule]()


def test_a_backlog_beyond_its_limit_is_detected() -> None:
    def never_full(self: Backlog, submit: Submit) -> None:
        return None

    names = range(4)
    wishes = [Wish(request(f"r{name}", [name] * 3, 12), Manner.RESUME, 1.2) for name in names]
    profile = Profile(wishes=wishes, max_num_sequences=1, max_waiting_requests=1, max_faults=0)
    assert not simulate(0, profile).failures
    with patch.object(Backlog, "why_full", never_full):
        found = simulate(0, profile).failures
    assert "requests wait, at most 1 may" in "".join(found)
