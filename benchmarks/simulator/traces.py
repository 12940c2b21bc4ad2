"""Reads requests of published traces, in their own formats, and makes up arrivals if they have
none.

| format | recognized by |
|---|---|
| Azure LLM inference | columns TIMESTAMP, ContextTokens, GeneratedTokens |
| BurstGPT | columns Timestamp, Request tokens, Response tokens |
| our own | columns prompt_tokens, output_tokens and, perhaps partly empty, arrival_s |
| Mooncake | a JSON object per line, with timestamp, input_length, output_length, hash_ids |

All may be compressed with gzip. Arrivals count from the first one.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from benchmarks.simulator.system import SimRequest
from shared.errors import PageStreamError

_MOONCAKE_BLOCK_TOKENS = 512  # that each of its hash_ids stands for
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Request tokens", "Response tokens")
_OURS = ("prompt_tokens", "output_tokens")


class TraceError(PageStreamError):
    """A trace cannot be read; with place and reason."""


def read_trace(path: Path) -> list[SimRequest]:
    """Read all requests of a trace, in the order of their arrival, numbered from 0.

    Requests without a prompt or without an output (failed ones) are skipped. In a trace without
    arrivals they are NaN: see ``with_poisson_arrivals``.

    Raises:
        TraceError: names file, line and value.
    """
    try:
        with _open(path) as file:
            first = file.readline()
            file.seek(0)
            if not first.strip():
                raise TraceError(f"{path}: it is empty")
            read = _read_mooncake if first.lstrip().startswith("{") else _read_csv
            found = list(read(path, file))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not found:
        raise TraceError(f"{path}: it has no request with a prompt and an output")
    found.sort(key=lambda request: request.arrival_s)
    start = found[0].arrival_s
    return [
        replace(request, id=number, arrival_s=request.arrival_s - start)
        for number, request in enumerate(found)
    ]


def has_arrivals(requests: Sequence[SimRequest]) -> bool:
    """Whether a trace has the arrival times of its requests."""
    return not np.isnan(requests[0].arrival_s)


def with_poisson_arrivals(
    requests: Iterable[SimRequest], rate: float, random: np.random.Generator
) -> Iterator[SimRequest]:
    """The same requests in the same order, with random arrivals.

    Args:
        rate: requests per second, on average.
        random: draws the gaps between arrivals.
    """
    now_s = 0.0
    for request in requests:
        now_s += random.exponential(1 / rate)
        yield replace(request, arrival_s=now_s)


def sped_up(requests: Iterable[SimRequest], factor: float) -> Iterator[SimRequest]:
    """The same requests with arrival times divided by ``factor``: 2 doubles the rate."""
    for request in requests:
        yield replace(request, arrival_s=request.arrival_s / factor)


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return gzip.open(path, "rt", newline="", encoding="utf-8")
    return path.open(newline="", encoding="utf-8")


# ------------------------------------------------------------------------- CSV


def _read_csv(path: Path, file: TextIO) -> Iterator[SimRequest]:
    reader = csv.DictReader(file)
    columns = [name.strip().lstrip("\ufeff") for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    if set(_AZURE) <= set(columns):
        arrival, prompt, output = _AZURE
    elif set(_BURST) <= set(columns):
        arrival, prompt, output = _BURST
    elif set(_OURS) <= set(columns):
        arrival, (prompt, output) = "arrival_s", _OURS
    else:
        raise TraceError(
            f"{path}, line 1: columns {', '.join(columns)}; expected are "
            + " or ".join(", ".join(names) for names in (_AZURE, _BURST, _OURS))
        )
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        num_prompt, num_output = _length(where, row, prompt), _length(where, row, output)
        arrival_s = _moment(where, row, arrival) if arrival == _AZURE[0] else None
        if arrival_s is None:
            arrival_s = _seconds(where, row, arrival)
        if num_prompt and num_output:
            yield SimRequest(0, arrival_s, num_prompt, num_output)


def _length(where: str, row: Mapping[str, str | None], name: str) -> int:
    text = row[name]
    try:
        number = float(text or "")
        if number < 0 or number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise TraceError(f"{where}: {name}={text!r} is no number of tokens") from None
    return int(number)


def _seconds(where: str, row: Mapping[str, str | None], name: str) -> float:
    text = row.get(name)
    if not text:
        return float("nan")
    try:
        found = float(text)
        if not 0 <= found < float("inf"):
            raise ValueError
    except ValueError:
        raise TraceError(f"{where}: {name}={text!r} is no time in seconds") from None
    return found


def _moment(where: str, row: Mapping[str, str | None], name: str) -> float:
    """Unix time in seconds of a timestamp such as 2023-11-16 18:15:46.6805900."""
    text = row[name] or ""
    whole, _, fraction = text.strip().partition(".")
    fraction, zone = _split_zone(fraction)
    try:
        moment = datetime.fromisoformat(whole + (zone or "+00:00"))
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise TraceError(f"{where}: {name}={text!r} is no moment") from None


def _split_zone(fraction: str) -> tuple[str, str]:
    for sign in "+-":
        digits, found, zone = fraction.partition(sign)
        if found:
            return digits, sign + zone
    return fraction.removesuffix("Z"), ""


# -------------------------------------------------------------------- Mooncake


def _read_mooncake(path: Path, file: TextIO) -> Iterator[SimRequest]:
    for number, line in enumerate(file, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: {line.strip()[:80]!r} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{where}: {line.strip()[:80]!r} is no object")
        arrival_ms = _integer(where, row, "timestamp")
        prompt = _integer(where, row, "input_length")
        output = _integer(where, row, "output_length")
        prefix = row.get("hash_ids", [])
        if not isinstance(prefix, list) or not all(type(found) is int for found in prefix):
            raise TraceError(f"{where}: hash_ids={str(prefix)[:80]} are no list of whole numbers")
        if prompt and output:
            yield SimRequest(
                id=0,
                arrival_s=arrival_ms / 1_000,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix=tuple(prefix),
                prefix_block_tokens=_MOONCAKE_BLOCK_TOKENS,
            )


def _integer(where: str, row: Mapping[str, object], name: str) -> int:
    found = row.get(name)
    if type(found) is not int or found < 0:
        raise TraceError(f"{where}: {name}={found!r} is no whole number from 0 on")
    return found
