"""``python -m scheduler_svc.past.child``: one question of a gateway's page about the past.

Reads a msgpack map from the standard input: the name of the question, its arguments, and entries of
the logs, which the gateway has read. Writes the answer as a line of JSON. Ends by itself where that
takes too long or too much memory.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from scheduler_svc.explain.log_sources import logs_of
from scheduler_svc.explain.merged_logs import RequestNotFound, timeline_of
from scheduler_svc.past.rerun import what_if
from scheduler_svc.past.stretch import StretchLogs, frames_of
from scheduler_svc.past.workload import workload_of
from shared.bus.api import Entry, EntryId
from shared.codec import decode_as
from shared.errors import PageStreamError
from shared.messages.snapshots import PoolSnapshot

_CPU_S = 20
_MEMORY_BYTES = 2 * 1024**3
_NICE = 10  # requests are served first

NumberOf = Callable[[str], int]


def answer(question: dict[str, Any], number_of: NumberOf) -> dict[str, Any]:
    """The answer to a question.

    Raises:
        ValueError: it cannot be answered.
    """
    logs = StretchLogs(
        *(_entries(question["logs"].get(name, ())) for name in ("snapshots", "plans", "outputs"))
    )
    match question["name"]:
        case "stretch":
            return frames_of(logs, number_of, question["since_ms"], question["until_ms"])
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
    print(json.dumps(found, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
