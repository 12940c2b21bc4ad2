"""Measures again, and rewrites the tables of docs/BENCHMARKS.md that commands can fill.

    python -m benchmarks.tables [--list] [TABLE ...]

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. By default all are measured,
one after the other, which takes about half an hour; the machine should do nothing else.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
_BLOCK = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->\n", re.DOTALL)
_RESULT = "RESULT"  # in a command: the file for its JSON; without it the command prints JSON

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Commands of Python modules, and the function from their results to rows, heading first."""

    commands: Sequence[str]
    rows: Callable[[Sequence[Any]], Rows]


def scheduler_rows(results: Sequence[Mapping[str, Mapping[str, float]]]) -> Rows:
    """Milliseconds of a scheduling step."""
    [found] = results
    names = {
        "steady_ms": "steady decode",
        "churn_ms": "churn",
        "churn_100k_waiting_ms": "churn, 100,000 waiting",
    }
    sizes = [f"{int(size):,}" for size in found["steady_ms"]]
    values = ([names[name], *(f"{ms:.3g}" for ms in row.values())] for name, row in found.items())
    return [["ms per step, running sequences", *sizes], *values]


def gap_rows(results: Sequence[Mapping[str, float]]) -> Rows:
    """Microseconds from a result to the next plan, one result for each number of sequences."""
    heading = ["decoding sequences", "median, µs", "90 %", "99 %"]
    sizes = ("64", "256", "1,024")
    return [
        heading,
        *(
            [size, *(f"{found[key]:,.0f}" for key in ("p50_us", "p90_us", "p99_us"))]
            for size, found in zip(sizes, results, strict=True)
        ),
    ]


def linear_rows(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Milliseconds of linear layers and decode steps in bfloat16, ours and torch's."""
    found = results[0]["bfloat16"]
    layers, steps = found["layers"], found["steps"]
    counts = list(next(iter(layers.values())))
    rows = [
        [layer, *(f"{times[n]['ours']:.2f} : {times[n]['torch']:.2f}" for n in counts)]
        for layer, times in layers.items()
    ]
    whole = (f"{steps[n]['on']:.1f} : {steps[n]['off']:.1f}" if n in steps else "" for n in counts)
    return [["ms, ours : torch's; rows", *counts], *rows, ["decode step", *whole]]


def sampling_rows(results: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> Rows:
    """Milliseconds of a decode step by sampling method, and the time added to greedy."""
    [found] = results
    ways = list(next(iter(found.values())))
    least = {num: statistics.median(seconds[ways[0]]) for num, seconds in found.items()}

    def cell(num: str, way: str) -> str:
        step_s = statistics.median(found[num][way])
        more = "" if way == ways[0] else f" ({step_s / least[num] - 1:+.0%})"
        return f"{1e3 * step_s:.1f}{more}"

    return [
        ["ms per decode step, sequences", *found],
        *([way, *(cell(num, way) for num in found)] for way in ways),
    ]


def decoupling_rows(results: Sequence[Mapping[str, Mapping[str, float]]]) -> Rows:
    """Milliseconds of a step in a plain loop and live."""
    [found] = results
    heading = ["through, sequences", "in a loop, ms", "live, ms", "added"]
    return [
        heading,
        *(
            [
                name,
                f"{row['loop_ms']:.1f}",
                f"{row['live_ms']:.1f}",
                f"{row['added_percent']:+.1f} %",
            ]
            for name, row in found.items()
        ),
    ]


TABLES: Mapping[str, Table] = {
    "scheduler": Table(["benchmarks.micro.scheduler_step --json"], scheduler_rows),
    "plan-gap": Table(
        [f"benchmarks.micro.plan_gap --sequences {num} --json" for num in (64, 256, 1024)],
        gap_rows,
    ),
    "smollm2-linear": Table(
        ["benchmarks.micro.cpu_linear --model smollm2 --rows 1,4,16,64 --batches 1,4,16,64 --json"],
        linear_rows,
    ),
    "smollm2-sampling": Table(
        [f"benchmarks.micro.sampling --model smollm2 --json {_RESULT}"], sampling_rows
    ),
    "smollm2-decoupling": Table(
        ["benchmarks.serving.decoupling --model smollm2 --json"], decoupling_rows
    ),
}


def measure(command: str) -> Any:
    """Run one command and parse its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [str(file) if word == _RESULT else word for word in command.split()]
        done = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, check=True)
        return json.loads(file.read_bytes() if file.exists() else done.stdout)


def markdown(rows: Rows, commands: Sequence[str], when: datetime.date) -> str:
    """The table with its commands, date and machine."""
    run = "; ".join(
        f"`python -m {command.replace(f' {_RESULT}', ' FILE')}`" for command in commands
    )
    heading, *others = (f"| {' | '.join(row)} |" for row in rows)
    rule = "|" + "---|" * len(rows[0])
    lines = [f"{run}, {when}, {os.cpu_count()} cores of {_processor()}:", "", heading, rule]
    return "\n".join([*lines, *others]) + "\n"


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a table."""
    marks = [found for found in _BLOCK.finditer(page) if found["name"] == name]
    assert len(marks) == 1, f"{len(marks)} places for the table {name}"
    return page[: marks[0].start("body")] + text + page[marks[0].end("body") :]


def names_in(page: str) -> list[str]:
    """The tables for which the page has a place."""
    return [found["name"] for found in _BLOCK.finditer(page)]


def _processor() -> str:
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return models[0] if models else "an unknown processor"


def main() -> None:
    """Measure the requested tables, and rewrite the page after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"there is no table {', '.join(sorted(unknown))}: {', '.join(TABLES)}")
    for name in args.tables or TABLES:
        table = TABLES[name]
        print(f"{name}: {'; '.join(table.commands)}", file=sys.stderr)
        if not args.list:
            rows = table.rows([measure(command) for command in table.commands])
            text = markdown(rows, table.commands, datetime.date.today())
            PAGE.write_text(replaced(PAGE.read_text(), name, text))


if __name__ == "__main__":
    main()
