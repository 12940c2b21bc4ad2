"""Results of chaos runs, also of those that ran out of time."""

import dataclasses

import pytest

from tests.chaos.report import FAILED, OUT_OF_TIME, Row, verdict

GOOD = Row("kill worker", 5, 5, 5, 0, 0, 3, 1, [0.1], [], 9.0)
UNASKED = dataclasses.replace(GOOD, name="pause worker", total=0, complete=0, equal=0)
CHANGED = dataclasses.replace(GOOD, name="kill redis", equal=4)


@pytest.mark.parametrize(
    ("rows", "num_scenarios", "code", "meaning"),
    [
        ([GOOD, GOOD], 2, 0, "all is well"),
        ([GOOD], 3, OUT_OF_TIME, "no time for 2 of 3 runs"),
        ([GOOD, UNASKED], 2, OUT_OF_TIME, "no time for 1 of 2 runs"),
        ([UNASKED], 13, OUT_OF_TIME, "no time for 13 of 13 runs"),
        ([GOOD, CHANGED], 3, FAILED, "changed: kill redis"),
        ([], 1, OUT_OF_TIME, "no time"),
    ],
)
def test_what_ran_out_of_time_is_no_failure_of_texts(
    rows: list[Row], num_scenarios: int, code: int, meaning: str
) -> None:
    found = verdict(rows, num_scenarios, exact=True)
    assert found[0] == code
    assert meaning in found[1]


def test_texts_of_bfloat16_may_differ() -> None:
    assert verdict([CHANGED], 1, exact=False)[0] == 0
