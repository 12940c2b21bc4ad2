"""Logs that are made by hand, and what is read from their timelines."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from scheduler_svc.explain.merged_logs import (
    LoggedMessage,
    Logs,
    timeline_of,
)
from scheduler_svc.explain.timeline import Event, Kind, Timeline
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.endings import EndFlag
from shared.messages.outputs import (
    BeamCandidates,
    ChoiceState,
    RequestState,
    StepResult,
)
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Submit
from tests.support.requests import submit

EPOCH = 100_000
STARTED = EpochStarted(EPOCH, "s1", ("w1",))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def state(
    request: Submit | str, *handles: int, output: Sequence[int] = (), **changes: Any
) -> RequestState:
    """One unfinished choice for each handle, all with this output."""
    asked = submit(request) if isinstance(request, str) else request
    choices = [ChoiceState(n, handle, ints(*output), "") for n, handle in enumerate(handles)]
    return RequestState(asked, tuple(choices), **{"requests_cursor": "0-0", **changes})


def result(
    step: int,
    *rows: int,
    ended: Sequence[int] = (),
    admitted: dict[int, int] | None = None,
    beams: Sequence[int] = (),
    step_us: int = 10_000,
) -> StepResult:
    """A token for each handle of ``rows``; those of ``ended`` stop."""
    found = [BeamCandidates(g, ints(0), ints(7), np.zeros(1, np.float32), ints(0)) for g in beams]
    return StepResult(
        step=step,
        handles=ints(*rows),
        tokens=ints(*(999 for _ in rows)),
        ended_rows=ints(*(rows.index(handle) for handle in ended)),
        ended_flags=ints(*(EndFlag.STOP for _ in ended)),
        beams=tuple(found),
        logprobs=(),
        prompt_logprobs=(),
        admitted_handles=ints(*(admitted or {})),
        admitted_computed=ints(*(admitted or {}).values()),
        num_batched_tokens=len(rows),
        model_us=0,
        step_us=step_us,
    )


def plan(step: int, now_ms: int, outputs_cursor: str = f"{EPOCH}-0", **changes: Any) -> StepPlan:
    arrays = (
        "retired swap_out_device swap_out_host swap_in_host swap_in_device copy_sources "
        "copy_targets replaced_handles replaced_columns grown_handles grown_blocks fork_parents "
        "fork_children fork_choices chunk_handles chunk_tokens"
    )
    values: dict[str, Any] = dict.fromkeys(arrays.split(), ints())
    values |= {"beams": (), "admissions": (), "requests_cursor": "0-0", "outputs_min_id": "0-0"}
    return StepPlan(
        step=step, now_ms=now_ms, outputs_cursor=outputs_cursor, **{**values, **changes}
    )


def outputs(*messages: Message) -> list[LoggedMessage]:
    """Entries of one message each; every EpochStarted begins a new numbering."""
    logged: list[LoggedMessage] = []
    epoch, seq = EPOCH, 0
    for message in messages:
        if isinstance(message, EpochStarted):
            epoch, seq = message.epoch, 0
        logged.append(LoggedMessage(EntryId(epoch, seq), message))
        seq += 1
    return logged


def asked(*messages: tuple[int, Message]) -> list[LoggedMessage]:
    return [LoggedMessage(EntryId(at_ms, 0), message) for at_ms, message in messages]


def explained(logs: Logs, request_id: str = "a") -> Timeline:
    return timeline_of(request_id, logs)


def kinds(timeline: Timeline) -> list[str]:
    return [event.kind for event in timeline.events]


def only(timeline: Timeline, kind: Kind) -> Event:
    [event] = [event for event in timeline.events if event.kind == kind]
    return event
