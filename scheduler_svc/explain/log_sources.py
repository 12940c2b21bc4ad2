"""Where the logs come from: Redis, as far as they have not been trimmed, or a recording."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from scheduler_svc.core.config import ProtocolError
from scheduler_svc.explain.merged_logs import LoggedMessage, Logs, Planned
from scheduler_svc.recording import BadRecording, EntryFrame, EpochFrame, PlanFrame, read_frames
from scheduler_svc.replay import Replay, ReplayDiffers
from shared.bus.api import START, Bus, Entry
from shared.bus.keys import EngineKeys
from shared.codec import decode, decode_as
from shared.errors import DecodeError
from shared.messages.leases import EngineInfo
from shared.messages.plans import EpochStarted, StepPlan
from shared.outputs_log.reader import check_output

_PAGE = 1_000  # entries per read


async def from_bus(bus: Bus, engine_id: str) -> Logs:
    """All that an engine's logs still hold; nothing is written.

    Raises:
        BusUnavailable: Redis does not answer.
    """
    keys = EngineKeys(engine_id)
    block_size = await _block_size(bus, keys)
    # Outputs last: no result is without its plan because that was written between two reads.
    requests = await _read_all(bus, keys.requests)
    plans = await _read_all(bus, keys.plans)
    return logs_of(requests, plans, await _read_all(bus, keys.outputs), block_size)


def logs_of(
    requests: Sequence[Entry],
    plans: Sequence[Entry],
    outputs: Sequence[Entry],
    block_size: int | None,
) -> Logs:
    """Entries that are left of an engine's logs."""
    logs = Logs(block_size=block_size)
    logs.requests = _messages(requests, logs)
    logs.plans = [
        Planned(logged.at.epoch, logged.message)
        for logged in _messages(plans, logs)
        if isinstance(logged.message, StepPlan)
    ]
    logs.outputs = _messages(outputs, logs, are_outputs=True)
    _note_extent(logs)
    return logs


def from_recording(path: Path) -> Logs:
    """All that a scheduler was given, with the preemptions that a replay of it shows.

    Raises:
        BadRecording: the file cannot be read.
    """
    logs = Logs(unknown=["who the scheduler and worker of an epoch are: recordings do not say"])
    replay: Replay | None = None
    epoch = 0
    for frame in read_frames(path):
        match frame:
            case EpochFrame():
                epoch, replay = frame.fence.epoch, Replay(frame)
                logs.block_size = frame.config.block_size
                logs.outputs.append(LoggedMessage(frame.fence, EpochStarted(epoch, "", ())))
            case EntryFrame() if epoch:
                _add(frame, logs)
                if replay is not None:
                    replay.add(frame)
            case PlanFrame() if epoch:
                replay = _plan(frame, epoch, replay, logs)
            case _:
                raise BadRecording(f"{path}: the recording does not begin with an epoch")
    return logs


def _add(frame: EntryFrame, logs: Logs) -> None:
    known = logs.requests if frame.log == "requests" else logs.outputs
    if not known or frame.entry.id > known[-1].at:  # a new epoch may read requests once more
        known += _messages([frame.entry], logs, frame.log == "outputs")


def _plan(frame: PlanFrame, epoch: int, replay: Replay | None, logs: Logs) -> Replay | None:
    """Make a plan again; None once that does not work any more in this epoch."""
    if replay is not None:
        try:
            plan = replay.plan(frame.plan)
        except (ReplayDiffers, ProtocolError) as error:
            logs.unknown.append(f"preemptions from here on, in epoch {epoch}: {error}")
            replay = None
        else:
            replay.core.take_events()
            logs.plans.append(Planned(epoch, plan))
            return replay
    try:
        logs.plans.append(Planned(epoch, decode_as(StepPlan, frame.plan)))
    except DecodeError as error:
        logs.unknown.append(f"an unreadable plan of epoch {epoch}: {error}")
    return replay


async def _block_size(bus: Bus, keys: EngineKeys) -> int | None:
    value = await bus.get(keys.info)
    if value is None:
        return None
    try:
        info: EngineInfo = decode_as(EngineInfo, value)
    except DecodeError:
        return None
    return None if info.kv is None else info.kv.block_size


async def _read_all(bus: Bus, log: str) -> list[Entry]:
    """Up to the entry that is the last one now."""
    top, cursor = await bus.last_id(log), START
    entries: list[Entry] = []
    while cursor < top:
        found = (await bus.read({log: cursor}, 0, _PAGE)).get(log, [])
        if not found:
            break
        entries += found
        cursor = found[-1].id
    return entries


def _messages(
    entries: Iterable[Entry], logs: Logs, are_outputs: bool = False
) -> list[LoggedMessage]:
    found = []
    for entry in entries:
        for data in entry.messages:
            try:
                message = decode(data)
                if are_outputs:
                    check_output(entry.id, message)
                found.append(LoggedMessage(entry.id, message))
            except DecodeError as error:
                logs.unknown.append(f"what the unreadable entry {entry.id} says: {error}")
    return found


def _note_extent(logs: Logs) -> None:
    """Note which parts of the logs are gone."""
    if not logs.requests:
        logs.unknown.append("what gateways said: requests is empty, or trimmed")
    else:
        since = _clock_time(logs.requests[0].at.epoch)
        logs.unknown.append(f"what gateways said before {since}: requests begins there")
    if not logs.plans:
        logs.unknown.append("all plans: a plan is trimmed once its result has been read")
    else:
        first, last = logs.plans[0], logs.plans[-1]
        logs.unknown.append(
            f"plans before step {first.plan.step} of epoch {first.epoch}: they have been trimmed, "
            f"and reach to step {last.plan.step} of epoch {last.epoch}"
        )
    if not logs.outputs:
        logs.unknown.append("all outputs: the log is empty")
    elif not isinstance(logs.outputs[0].message, EpochStarted):
        at = logs.outputs[0].at
        logs.unknown.append(f"what was in outputs before {at}: it has been trimmed")


def _clock_time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ms / 1e3)) + " UTC"
