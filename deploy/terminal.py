"""The launcher's output: progress, warnings and errors."""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from deploy.processes.supervisor import Died, Event, GaveUp, Recovered, Respawned, Started, Stopped

# The level of a log line, a service's message about a setting, or Python's about an exception.
_HEAD = re.compile(r"^\S+Z [A-Z]+ +\S+ ")
_LONGEST_EVENT = 120
_MOST_LINES = 8  # of the end of a traceback
_ERROR = re.compile(r"^\S+Z ERROR |^error: |^Traceback ")


@dataclass(frozen=True, slots=True)
class Failure:
    """A service that cannot run, and the reason, for which the launcher stops."""

    service: str
    how: str
    log_tail: Sequence[str]


def errors_in(log_tail: Sequence[str]) -> Sequence[str]:
    """The last error in a log and the end of what follows it; empty if there is none."""
    for index in reversed(range(len(log_tail))):
        if _ERROR.search(log_tail[index]):
            first, *others = log_tail[index:]
            return [first, *others[-_MOST_LINES:]]
    return ()


def event_in(line: str) -> str:
    """A log line without its time, its level and the service's name."""
    return _HEAD.sub("", line)[:_LONGEST_EVENT]


class Terminal:
    """Writes progress to standard output and trouble to standard error, with the launcher's age."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the launcher started."""
        return time.monotonic() - self._start

    def show(self, text: str) -> None:
        """Write a line of progress."""
        self._print(f"[{self.age_s:6.1f}s] {text}", sys.stdout)

    def warn(self, text: str, log_tail: Sequence[str] = ()) -> None:
        """Write a line of trouble, with the last lines of a service's log."""
        lines = [f"[{self.age_s:6.1f}s] {text}", *(f"    | {line}" for line in log_tail)]
        self._print("\n".join(lines), sys.stderr)

    def show_event(self, event: Event) -> None:
        """Write an event of a supervisor."""
        match event:
            case Started(service, pid):
                self.show(f"{service:<9} started, process {pid}")
            case Died(service, how, log_tail, restart_in_s):
                self.warn(f"{service:<9} died ({how}); next start in {restart_in_s:g} s", log_tail)
            case Respawned(service, how, log_tail):
                self.warn(f"{service:<9} died ({how}); it is started again", errors_in(log_tail))
            case Recovered(service, after_s):
                self.show(f"{service:<9} is back after {after_s:.1f} s")
            case GaveUp(service, how, _):
                self.warn(f"{service:<9} cannot run ({how}), and a restart would not mend it")
            case Stopped(service, how, killed):
                if killed:
                    self.warn(f"{service:<9} had to be killed")
                else:
                    self.show(f"{service:<9} stopped ({how})")

    def show_failure(self, failure: Failure) -> None:
        """Write which service cannot run, and the reason in its log."""
        reason = errors_in(failure.log_tail) or failure.log_tail
        self.warn(f"error: {failure.service} cannot run ({failure.how}):", reason)

    def _print(self, text: str, stream: TextIO) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # the reader has gone, which is no reason to stop serving
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
