"""A million random steps of the scheduler core: arrivals, aborts, stops, forks, beams, pinned
prefixes, failing workers.

What each step must satisfy stands in ``tests/support/walks``: ``core_checks`` for the core,
``worker`` for the plans, ``clients`` for the tokens, ``beams`` for the searches.
"""

from tests.support.walks.background import BackgroundWalks

NUM_STEPS = 1_000_000
DEADLINE_S = 1_100  # only for what hangs: it takes 150 s on two idle cores

# What a walk may not be without for long: a hundredth of what has been seen, or more.
AT_LEAST = {
    "admissions": 50_000,
    "reused tokens": 100_000,
    "forks": 10_000,
    "copies": 5_000,
    "preempted by recompute": 5_000,
    "preempted by swap": 2_000,
    "displaced": 50,
    "shortened steps": 50,
    "fair passes": 3_000,
    "swaps in": 10_000,
    "beam steps": 50_000,
    "beam forks": 15_000,
    "searches preempted by recompute": 200,
    "searches preempted by swap": 100,
    "searches recovered": 500,
    "finished beams recovered": 200,
    "searches over when recovered": 50,
    "admissions of prefixes": 1_000,
    "prefixes pinned": 1_000,
    "prefixes refused": 1_000,
    "prefixes given up": 500,
    "admissions behind prefixes": 500,
    "aborts": 5_000,
    "stale aborts": 1_000,
    "stops": 2_000,
    "failures": 1_000,
    "checkpoints": 1_000,
    "trimmed entries": 100_000,
    "refused": 1_000,
    "ended by length": 50_000,
    "ended by stop": 10_000,
    "ended by abort": 5_000,
}


def test_a_million_random_steps_keep_every_promise(background_walks: BackgroundWalks) -> None:
    """A failing walk prints the command that repeats it, with as few events as will do."""
    totals = background_walks.totals(DEADLINE_S)
    assert totals["steps"] >= NUM_STEPS
    rare = {name: totals[name] for name, least in AT_LEAST.items() if totals[name] < least}
    assert not rare, f"walks hardly ever came to this: {rare}, of {totals}"
