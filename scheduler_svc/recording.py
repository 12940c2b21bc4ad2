"""A recording of what the scheduler core was given and what it planned, for replay.

A file of msgpack frames ``[kind, id, payload]``, in the order in which the scheduler saw them:

    epoch     id of the fence   configuration, requests cursor, RequestStates taken over
    requests  id of the entry   its messages
    outputs   id of the entry   its messages
    plan      id of the entry   the StepPlan
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from scheduler_svc.core.config import SchedulerConfig
from shared.bus.api import Entry, EntryId
from shared.errors import PageStreamError


class BadRecording(PageStreamError):
    """The file is no recording, or a frame of it cannot be read."""


@dataclass(frozen=True, slots=True)
class EpochFrame:
    """An epoch began with this configuration and these unfinished requests."""

    fence: EntryId
    config: SchedulerConfig
    requests_cursor: EntryId
    states: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EntryFrame:
    """The core was given an entry of a log."""

    log: str  # "requests" or "outputs"
    entry: Entry


@dataclass(frozen=True, slots=True)
class PlanFrame:
    """The core made a plan."""

    plan: bytes


Frame = EpochFrame | EntryFrame | PlanFrame


class FileRecorder:
    """Appends everything that the core is given and everything that it plans to a file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")

    def epoch(
        self,
        fence: EntryId,
        config: SchedulerConfig,
        requests_cursor: EntryId,
        states: Sequence[bytes],
    ) -> None:
        """An epoch begins."""
        payload = [dataclasses.asdict(config), str(requests_cursor), list(states)]
        self._write("epoch", fence, payload)

    def entry(self, log: str, entry: Entry) -> None:
        """The core is given an entry."""
        self._write(log, entry.id, list(entry.messages))

    def plan(self, entry_id: EntryId, plan: bytes) -> None:
        """The core made a plan."""
        self._write("plan", entry_id, plan)

    def close(self) -> None:
        """Nothing can be recorded afterwards."""
        self._file.close()

    def _write(self, kind: str, at: EntryId, payload: Any) -> None:
        self._file.write(msgpack.packb([kind, str(at), payload]))
        self._file.flush()


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of a recording, without a last one of which the end is missing.

    Raises:
        BadRecording: a frame cannot be read.
    """
    with path.open("rb") as file:
        try:
            for kind, at, payload in msgpack.Unpacker(file):
                yield _frame(kind, EntryId.parse(at), payload)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise BadRecording(f"{path}: {error}") from None


def _frame(kind: str, at: EntryId, payload: Any) -> Frame:
    match kind:
        case "epoch":
            config, cursor, states = payload
            return EpochFrame(at, SchedulerConfig(**config), EntryId.parse(cursor), tuple(states))
        case "requests" | "outputs":
            return EntryFrame(kind, Entry(at, tuple(payload)))
        case "plan":
            return PlanFrame(payload)
    raise BadRecording(f"unknown frame {kind!r}")
