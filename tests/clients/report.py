"""Results of calls, and the tables of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Result(StrEnum):
    """What became of a call."""

    OK = "ok"
    FAILED = "failed"
    KNOWN = "known"  # it failed by the client's own fault
    SKIPPED = "skipped"  # the server does not have what it needs
    UNAVAILABLE = "unavailable"  # the client cannot be run here


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a client.

    Attributes:
        detail: the error's first line, or a reason; may be empty.
    """

    client: str
    version: str
    call: str
    result: Result
    detail: str = ""
    seconds: float = 0.0


def rows_of(
    client: str, lines: Iterable[str], known: Mapping[str, str], ending: str
) -> Iterator[Row]:
    """Rows of what a runner has written.

    Args:
        lines: its results, JSON each.
        known: reasons of calls that fail by the client's own fault.
        ending: what is said of a call that was begun and has no result, and of a program
            without any.
    """
    version, begun, num_calls = "", "", 0
    for found in map(json.loads, lines):
        version = found.get("version", version)
        begun = found.get("begun", begun)
        if "call" not in found:
            continue
        begun, num_calls = "", num_calls + 1
        name, result = found["call"], Result(found["result"])
        detail, seconds = found.get("detail", ""), found.get("seconds", 0.0)
        if result is Result.FAILED and name in known:
            result, detail = Result.KNOWN, f"{known[name]} ({detail})"
        yield Row(client, version, name, result, detail, seconds)
    if begun or not num_calls:
        yield Row(client, version, begun or "import", Result.FAILED, ending)


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a call failed that should not, 3 if a client could not be run, else 0."""
    results = {row.result for row in rows}
    if Result.FAILED in results:
        return 1
    return 3 if Result.UNAVAILABLE in results else 0


def text_table(rows: Sequence[Row]) -> str:
    """One line a call, in columns."""
    cells = [("client", "version", "call", "result"), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        "  ".join([*map(str.ljust, line[:3], widths), line[3]]).rstrip() for line in cells
    )


def markdown_table(rows: Sequence[Row]) -> str:
    """One line for each client and result, as the documentation has it."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        _, version, call, result = _cells(row)
        groups.setdefault((row.client, version, result), []).append(f"`{call}`" if call else "")
    lines = [
        f"| {client} | {version} | {', '.join(calls)} | {result} |"
        for (client, version, result), calls in groups.items()
    ]
    return "\n".join(["| client | version | calls | result |", "|---|---|---|---|", *lines])


def json_table(rows: Sequence[Row]) -> str:
    """A list of objects with the fields of ``Row``."""
    return json.dumps([asdict(row) for row in rows], indent=1)


def _cells(row: Row) -> tuple[str, str, str, str]:
    words = {Result.KNOWN: "the client's fault", Result.FAILED: "failed"}
    result = words.get(row.result, str(row.result))
    return row.client, row.version, row.call, f"{result}: {row.detail}" if row.detail else result
