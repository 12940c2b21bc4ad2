"""``python -m scheduler_svc.replay FILE``: run a recording through the scheduler core again.

The plans must come out byte for byte as recorded; the first that does not is reported. Prints a
timeline of the KV pool and of preemptions. ``--record FILE`` of the scheduler makes a recording.
"""

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler_svc.core.events import Event, Preempted, Stats
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import BadRecording, EntryFrame, EpochFrame, read_frames
from scheduler_svc.recovery import Recovery, resume
from shared.bus.api import Entry, EntryId
from shared.codec import decode, decode_as
from shared.errors import DecodeError, PageStreamError
from shared.messages.outputs import OutputsMessage
from shared.messages.plans import StepPlan, Tick


class ReplayDiffers(PageStreamError):
    """The core made another plan than it did when it was recorded."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after one plan."""

    epoch: int
    step: int
    stats: Stats
    events: list[Event]


class Replay:
    """Feeds one epoch's entries to a fresh core, at the moments that its plans name."""

    def __init__(self, frame: EpochFrame) -> None:
        self.core = Scheduler(frame.config, frame.requests_cursor)
        recovery = Recovery(frame.config.max_model_len)
        for data in frame.states:
            state = decode(data)
            if not isinstance(state, OutputsMessage):
                raise BadRecording(f"an epoch begins with {type(state).__name__}")
            recovery.apply(state)
        resume(self.core, recovery, frame.fence)
        self._entries: dict[str, deque[Entry]] = {"outputs": deque(), "requests": deque()}

    def add(self, frame: EntryFrame) -> None:
        """An entry that some later plan has seen."""
        self._entries[frame.log].append(frame.entry)

    def plan(self, recorded: bytes) -> StepPlan:
        """Make the next plan again.

        Raises:
            ReplayDiffers: it is not the recorded one.
        """
        expected: StepPlan = decode_as(StepPlan, recorded)
        for tick in expected.idle_turns:
            self._catch_up(tick)
            if self.core.schedule(tick.now_ms) is not None:
                raise ReplayDiffers(f"step {expected.step}: a plan came too early")
        self._catch_up(Tick(expected.now_ms, expected.requests_cursor, expected.outputs_cursor))
        found = self.core.schedule(expected.now_ms)
        same = found
        if found is not None and not expected.preemptions:
            # Versions that wrote none made recordings, too; the other fields show the same.
            same = replace(found, preemptions=())
        if found is None or same != expected:  # as they would be written now
            raise ReplayDiffers(f"step {expected.step}: the plan is another one: {found}")
        return found

    def _catch_up(self, tick: Tick) -> None:
        for log, cursor in (("outputs", tick.outputs_cursor), ("requests", tick.requests_cursor)):
            entries = self._entries[log]
            until = EntryId.parse(cursor)
            while entries and entries[0].id <= until:
                entry = entries.popleft()
                if log == "outputs":
                    self.core.read_outputs(entry.id, entry.num_bytes)
                for data in entry.messages:
                    try:
                        self.core.apply(decode(data), entry.id)
                    except DecodeError:
                        self.core.skip_request(entry.id)


def replay(path: Path) -> Iterator[Moment]:
    """The state after each plan of a recording.

    Raises:
        ReplayDiffers: a plan is not the recorded one.
        BadRecording: the file cannot be read.
    """
    current: Replay | None = None
    epoch = 0
    for frame in read_frames(path):
        if isinstance(frame, EpochFrame):
            current, epoch = Replay(frame), frame.fence.epoch
        elif current is None:
            raise BadRecording(f"{path}: the recording does not begin with an epoch")
        elif isinstance(frame, EntryFrame):
            current.add(frame)
        else:
            plan = current.plan(frame.plan)
            yield Moment(epoch, plan.step, current.core.stats(), current.core.take_events())


def main() -> None:
    """Replay and print; exits with 1 if a plan differs."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="recording made with --record")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines")
    args = parser.parse_args()
    num_plans = 0
    print(f"{'step':>8} {'running':>8} {'waiting':>8} {'used':>8} {'cached':>8} {'shared':>8}")
    try:
        for moment in replay(args.file):
            num_plans += 1
            _print(moment, args.every)
    except (PageStreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"{num_plans} plans, all as recorded")


def _print(moment: Moment, every: int) -> None:
    for event in moment.events:
        if isinstance(event, Preempted):
            print(
                f"{moment.step:>8} preempted {event.request_id} by {event.by}, "
                f"{event.num_tokens} tokens lost"
            )
    if moment.step % every in (0, 1):
        stats = moment.stats
        print(
            f"{moment.step:>8} {stats.num_running:>8} {stats.num_waiting:>8} "
            f"{stats.num_used_blocks:>8} {stats.num_cached_blocks:>8} {stats.num_shared_blocks:>8}"
        )


if __name__ == "__main__":
    main()
