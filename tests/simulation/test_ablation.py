"""Every rule of the protocol is needed: without it, runs fail that do not fail with it."""

import pytest

from tests.simulation.ablation import RULES, failing

MOST_SEEDS = 400


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_some_run_fails(rule: str) -> None:
    for seed in range(MOST_SEEDS):
        if failing(rule, [seed]):
            assert not failing(None, [seed], rule), f"seed {seed} fails with the rule, too"
            return
    pytest.fail(f"none of {MOST_SEEDS} runs fails without it")
