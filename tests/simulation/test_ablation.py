"""Every rule of the protocol is needed: without it, runs fail that do not fail with it."""

import pytest

from tests.simulation.ablation import FENCE, RULES, VIEWS, failing, without
from tests.simulation.profile import Manner, Profile, Wish, request
from tests.simulation.scripts import Cue, Directed, crash, lose_tail, move_clients
from tests.simulation.simulate import Run, simulate

MOST_SEEDS = 400


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_some_run_fails(rule: str) -> None:
    for seed in range(MOST_SEEDS):
        if failing(rule, [seed]):
            assert not failing(None, [seed], rule), f"seed {seed} fails with the rule, too"
            return
    pytest.fail(f"none of {MOST_SEEDS} runs fails without it")


def test_without_the_fence_a_client_that_moves_has_what_nobody_knows() -> None:
    seeds = range(80)
    assert not any(moves_while_an_epoch_starts(seed).failures for seed in seeds)
    with without(FENCE):
        assert any(moves_while_an_epoch_starts(seed).failures for seed in seeds)


def test_without_views_a_lost_tail_ends_streams() -> None:
    seeds = range(10)
    assert not any(loses_what_was_delivered(seed).failures for seed in seeds)
    with without(VIEWS):
        assert any(loses_what_was_delivered(seed).failures for seed in seeds)


def loses_what_was_delivered(seed: int) -> Run:
    """The log forgets some of the tokens that the client has."""
    wish = Wish(request("r0", [1, 2, 3], 12), Manner.RESUME, at_s=1.2)
    script = Directed(Cue("worker", "after", "append outputs", 6, lose_tail(8)))
    return simulate(seed, Profile(wishes=[wish]), script)


def moves_while_an_epoch_starts(seed: int) -> Run:
    """Views of those who stay mend what the lack of a fence does; who moves has none."""
    wish = Wish(request("r0", [1, 2, 3], 12), Manner.RESUME, at_s=1.2)
    script = Directed(
        Cue("scheduler", "after", "append plans", 4, crash(0.0)),
        Cue("scheduler", "before", "append plans, outputs", 1, move_clients),
    )
    profile = Profile(wishes=[wish], max_plans_in_flight=4, latency_s=0.02)
    return simulate(seed, profile, script)
