"""An engine's state over a stretch of its logs, as frames. Pure."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.api import Entry, EntryId
from shared.codec import decode
from shared.engine_view.frames import FrameSource
from shared.engine_view.log_follower import LogFollower
from shared.errors import DecodeError
from shared.messages.plans import StepPlan

_FRAME_MS = 50  # of the engine's time; a longer stretch has longer ones
_MOST_FRAMES = 400


@dataclass(frozen=True, slots=True)
class StretchLogs:
    """The entries of a stretch.

    Attributes:
        snapshots: the first one is the state to begin with.
        plans: that follow it.
        outputs: that follow it.
    """

    snapshots: Sequence[Entry]
    plans: Sequence[Entry]
    outputs: Sequence[Entry]


def frames_of(
    logs: StretchLogs, number_of: Callable[[str], int], since_ms: int, until_ms: int
) -> dict[str, Any]:
    """The state at the start of a stretch, and what changes in it.

    Args:
        since_ms: by the engine's clock.

    Returns:
        ``snapshot`` and ``frames`` of the feed; ``names`` are [number, id, API key].
    """
    follower = LogFollower(number_of)
    names: dict[str, str] = {}
    source = FrameSource()
    texts: list[str] = []
    every_ms = max(_FRAME_MS, (until_ms - since_ms) // _MOST_FRAMES)
    due_ms = since_ms
    for is_last in _followed(follower, logs):
        view = follower.view
        assert view is not None
        for request in view.changed.values():
            names[request.request_id] = request.tenant
        if view.now_ms > until_ms and texts:
            break
        if view.now_ms >= due_ms or is_last:
            due_ms = max(view.now_ms, due_ms + every_ms)
            if (text := source.advance(view)) is not None:
                texts.append(text)
    found = [json.loads(text) for text in texts]
    return {
        "snapshot": found[0] if found else None,
        "frames": found[1:],
        "names": [[number_of(name), name, tenant] for name, tenant in names.items()],
    }


def _followed(follower: LogFollower, logs: StretchLogs) -> Iterator[bool]:
    """Follow the logs plan by plan; each time, whether it was the last."""
    if not logs.snapshots or (begun := follower.begin(logs.snapshots[0])) is None:
        return
    yield False
    plans_from, outputs_from = begun
    snapshots = deque(logs.snapshots[1:])
    outputs = deque(entry for entry in logs.outputs if entry.id > outputs_from)
    for entry in logs.plans:
        if entry.id <= plans_from:
            continue
        until = _outputs_before(entry)
        taken: list[Entry] = []
        while outputs and (until is None or outputs[0].id <= until):
            taken.append(outputs.popleft())
        passed: list[Entry] = []
        while snapshots and snapshots[0].id < _as_snapshot_id(entry, follower):
            passed.append(snapshots.popleft())
        follower.read([entry], taken, passed)
        yield False
    follower.read([], outputs, snapshots)
    yield True


def _outputs_before(entry: Entry) -> EntryId | None:
    """The last entry of outputs that a plan was made after; None: not known."""
    try:
        plan = decode(entry.messages[0])
    except DecodeError:
        return EntryId(0, 0)
    return EntryId.parse(plan.outputs_cursor) if isinstance(plan, StepPlan) else entry.id


def _as_snapshot_id(entry: Entry, follower: LogFollower) -> EntryId:
    """The id that a snapshot made after a plan would have."""
    view = follower.view
    if view is None or view.epoch != entry.id.epoch:
        return EntryId(entry.id.epoch, 1 << 40)  # a view of this epoch begins at its first snapshot
    return EntryId(view.epoch, max(0, view.now_ms - view.epoch))
