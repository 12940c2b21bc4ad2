"""Tables of docs/BENCHMARKS.md: what commands print becomes rows, at the page's marks."""

import datetime
from typing import Any

import pytest

from benchmarks.tables import PAGE, TABLES, markdown, names_in, replaced

RESULTS: dict[str, list[Any]] = {
    "scheduler": [
        {
            "steady_ms": {"64": 0.0151, "4096": 0.15},
            "churn_ms": {"64": 0.17, "4096": 0.63},
            "churn_100k_waiting_ms": {"64": 0.19, "4096": 0.64},
        }
    ],
    "plan-gap": [{"steps": 9, "p50_us": 198.2, "p90_us": 499, "p99_us": 1048}] * 3,
    "smollm2-linear": [
        {
            "bfloat16": {
                "layers": {"down": {"1": {"ours": 0.09, "torch": 0.16}}},
                "steps": {"1": {"on": 8.21, "off": 14.1}},
            }
        }
    ],
    "smollm2-sampling": [{"16": {"greedy": [0.01, 0.01], "temperature 1": [0.011, 0.011]}}],
    "smollm2-decoupling": [{"bus 1": {"loop_ms": 5.7, "live_ms": 6.5, "added_percent": 14.03}}],
}
LAST_ROWS = {
    "scheduler": "| churn, 100,000 waiting | 0.19 | 0.64 |",
    "plan-gap": "| 1,024 | 198 | 499 | 1,048 |",
    "smollm2-linear": "| decode step | 8.2 : 14.1 |",
    "smollm2-sampling": "| temperature 1 | 11.0 (+10%) |",
    "smollm2-decoupling": "| bus 1 | 5.7 | 6.5 | +14.0 % |",
}


def test_the_page_has_one_place_for_each_table() -> None:
    assert sorted(names_in(PAGE.read_text())) == sorted(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_results_become_a_table_at_its_marks(name: str) -> None:
    table = TABLES[name]
    text = markdown(table.rows(RESULTS[name]), table.commands, datetime.date(2026, 11, 23))
    page = PAGE.read_text()
    changed = replaced(page, name, text)
    assert LAST_ROWS[name] in text.splitlines()
    assert f"<!-- table {name} -->\n{text}<!-- end -->\n" in changed
    assert names_in(changed) == names_in(page)


def test_a_table_without_a_place_is_an_error() -> None:
    with pytest.raises(AssertionError, match="0 places"):
        replaced("", "scheduler", "")
