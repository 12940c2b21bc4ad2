"""Helpers for reports: targets, tables, absent parts, files."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Absent:
    """A part of the run without figures."""

    part: str
    reason: str


def missed(figures: Iterable[tuple[str, float | None, float | None]]) -> tuple[str, ...]:
    """Entries (name, found, wanted or None) below their target; unknown figures are below."""
    return tuple(
        f"{name} {number(found)} < {wanted:.2f}"
        for name, found, wanted in figures
        if wanted is not None and (found is None or found < wanted)
    )


def number(found: float | None, wanted: float | None = None) -> str:
    """A figure, with its target if it has one."""
    target = "" if wanted is None else f" ({wanted:.2f})"
    return "–" + target if found is None else f"{found:.2f}{target}"


def table(head: list[str], rows: Iterable[tuple[list[str], list[list[str]]]]) -> str:
    """A Markdown table; each row has the cells of a case and the further cells of its lines."""
    lines = [_line(head), "|" + "---|" * len(head)]
    for case, ends in rows:
        left = case
        for end in ends or [[""] * (len(head) - len(case))]:
            lines.append(_line([*left, *end]))
            left = [""] * len(case)
    return "\n".join(lines)


def write_json(file: Path, found: object) -> None:
    """Replace a file as a whole; figures that are not finite become null, as JSON has none."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(_finite(found), indent=1, allow_nan=False) + "\n")
    part.replace(file)


def _finite(found: object) -> object:
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
