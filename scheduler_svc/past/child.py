"""``python -m scheduler_svc.past.child``: one question of a gateway's page about the past.

Reads a msgpack map from the standard input: the name of the question, its arguments, and entries of
the logs, which the gateway has read, or paths of recordings, which are read here. Writes the answer
as a line of JSON. Ends by itself where that takes too long or too much memory.
"""

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from scheduler_svc.explain.log_sources import logs_of
from scheduler_svc.explain.merged_logs import RequestNotFound, timeline_of
from scheduler_svc.past.recorded import recorded_stretch, span_of
from scheduler_svc.past.rerun import what_if
from scheduler_svc.past.stretch import StretchLogs, frames_of
from scheduler_svc.past.workload import workload_of
from shared.bus.api import Entry, EntryId
from shared.codec import decode_as
from shared.errors import PageStreamError
from shared.messages.snapshots import PoolSnapshot

_CPU_S = 20
_MEMORY_BYTES = 2 * 1024**3
_SPANS_S = 3.0  # for the spans of recordings
_NICE = 10  # requests are served first

NumberOf = Callable[[str], int]


def answer(question: dict[str, Any], number_of: NumberOf) -> dict[str, Any]:
    """The answer to a question.

    Raises:
        ValueError: it cannot be answered.
    """
    if question["name"] == "spans":
        return _spans(question["recordings"])
    if question["name"] == "span":
        if not (span := span_of(Path(question["recording"]))):
            raise ValueError("no plan in it can be read: it is no recording, or damaged")
        return span
    logs, problem = _logs_of(question)
    match question["name"]:
        case "stretch":
            frames = frames_of(logs, number_of, question["since_ms"], question["until_ms"])
            return frames | {"problem": problem}
        case "explain":
            return _explained(question, logs, number_of)
        case "rerun":
            if not logs.snapshots:
                raise ValueError("the logs do not reach back so far")
            snapshot: PoolSnapshot = decode_as(PoolSnapshot, logs.snapshots[0].messages[0])
            span_ms = (question["since_ms"], question["until_ms"])
            workload = workload_of(logs, span_ms[1])
            return what_if(json.loads(snapshot.settings), question["changes"], workload, span_ms)
    raise ValueError(f"unknown question {question['name']!r}")


def _logs_of(question: dict[str, Any]) -> tuple[StretchLogs, str]:
    """The entries that a question is about, and why they end early, or ""."""
    if "recording" in question:
        path = Path(question["recording"])
        return recorded_stretch(path, question["since_ms"], question["until_ms"])
    names = ("snapshots", "plans", "outputs")
    return StretchLogs(*(_entries(question["logs"].get(name, ())) for name in names)), ""


def _spans(paths: Iterable[str]) -> dict[str, Any]:
    """The spans of recordings by path, as far as there is time to read them."""
    spans: dict[str, Any] = {}
    until_s = time.monotonic() + _SPANS_S
    for path in paths:
        with suppress(OSError):  # it was deleted, or may not be read
            if (span := span_of(Path(path), lambda: time.monotonic() > until_s)) is None:
                break
            spans[path] = span
    return spans


def _explained(question: dict[str, Any], logs: StretchLogs, number_of: NumberOf) -> dict[str, Any]:
    """What ``scripts/explain`` tells of a request; others have numbers."""
    requests = _entries(question["logs"].get("requests", ()))
    found = logs_of(requests, logs.plans, logs.outputs, question["block_size"])
    own = question["request_id"]
    timeline = timeline_of(own, found)
    others = sorted(found.request_ids() - {own}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, others))) if others else None

    def shown(text: str) -> str:
        if pattern is None:
            return text
        return pattern.sub(lambda match: f"#{number_of(match[0])}", text)

    return {
        "status": timeline.status,
        "events": [[event.kind, event.when.at_ms, shown(event.text)] for event in timeline.events],
        "unknown": timeline.unknown,
    }


def _entries(packed: Iterable[tuple[str, list[bytes]]]) -> list[Entry]:
    return [Entry(EntryId.parse(at), tuple(messages)) for at, messages in packed]


def main() -> None:
    """Answer one question."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which ends the input
    question = msgpack.unpackb(sys.stdin.buffer.read(), use_list=False)
    numbers: dict[str, int] = {name: number for number, name in question["numbers"]}
    fresh = question["next"]

    def number_of(name: str) -> int:
        nonlocal fresh
        if name not in numbers:
            numbers[name] = fresh
            fresh += 1
        return numbers[name]

    try:
        found = answer(question, number_of)
    except (ValueError, TypeError, RequestNotFound, PageStreamError) as error:
        found = {"error": str(error)}
    except OSError as error:  # its text has the path
        found = {"error": f"the recording cannot be read: {error.strerror}"}
    print(json.dumps(found, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
