"""The command line of scripts/fleet; the fleet itself is tested in tests/integration."""

import pytest

from deploy.fleet import _model_and_count
from deploy.known_models import known_models
from shared.errors import SettingsError

DEMO = str(known_models()["demo"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("demo", (DEMO, 2)), ("demo=3", (DEMO, 3)), (f"{DEMO}=1", (DEMO, 1)), ("a/b=4", ("a/b", 4))],
)
def test_a_model_may_have_the_number_of_its_engines_behind_it(
    text: str, expected: tuple[str, int]
) -> None:
    assert _model_and_count(text, 2) == expected


@pytest.mark.parametrize("text", ["demo=0", "demo=101", "dmeo", "demo=", "demo=two"])
def test_a_model_that_is_not_there_or_has_no_possible_number_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--model"):
        _model_and_count(text, 2)
