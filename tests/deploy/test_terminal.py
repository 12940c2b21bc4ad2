"""The part of a service's log that the terminal shows."""

import pytest

from deploy.terminal import errors_in, event_in

STAMP = "2026-11-23T15:00:00.000Z"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (f"{STAMP} INFO    worker loading model type=llama", "loading model type=llama"),
        ("a line of a library", "a line of a library"),
        (f"{STAMP} INFO    gateway {'x' * 500}", "x" * 120),
    ],
)
def test_an_event_is_shown_without_what_every_line_has(line: str, event: str) -> None:
    assert event_in(line) == event


def test_the_last_error_is_shown_with_the_end_of_its_traceback() -> None:
    log = [
        f"{STAMP} ERROR   worker an earlier one",
        f"{STAMP} INFO    worker all is well",
        f"{STAMP} ERROR   worker the worker could not start",
        "Traceback-like lines:",
        *(f"  line {number}" for number in range(40)),
        "ValueError: the reason",
    ]
    shown = errors_in(log)
    assert shown[0].endswith("the worker could not start")
    assert shown[-1] == "ValueError: the reason"
    assert len(shown) < 12
    assert errors_in(log[1:2]) == ()
    assert errors_in(["error: --port='x': expected a whole number"])
