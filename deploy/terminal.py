"""What the launcher says, and to whom."""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from deploy.processes.supervisor import Back, Died, Event, GaveUp, Respawned, Started, Stopped

# The level of a log line, a service's word on its settings, and Python's on an exception.
_HEAD = re.compile(r"^\S+Z [A-Z]+ +\S+ ")
_LONGEST_EVENT = 120
_MOST_LINES = 8  # the end of a traceback
_ERROR = re.compile(r"^\S+Z ERROR |^error: |^Traceback ")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why everything is stopped: a service that cannot run."""

    service: str
    how: str
    log_tail: Sequence[str]


def errors_in(log_tail: Sequence[str]) -> Sequence[str]:
    """The last error in a log and the end of what follows; nothing if there is none."""
    for index in reversed(range(len(log_tail))):
        if _ERROR.search(log_tail[index]):
            first, *others = log_tail[index:]
            return [first, *others[-_MOST_LINES:]]
    return ()


def event_in(line: str) -> str:
    """A log line without the time, the level and the service's name."""
    return _HEAD.sub("", line)[:_LONGEST_EVENT]


class Terminal:
    """Progress goes to standard output, trouble to standard error, each line with its age."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the launcher started."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """One line of progress."""
        self._print(f"[{self.age_s:6.1f}s] {text}", sys.stdout)

    def complain(self, text: str, log_tail: Sequence[str] = ()) -> None:
        """One line of trouble, with what a service wrote last."""
        lines = [f"[{self.age_s:6.1f}s] {text}", *(f"    | {line}" for line in log_tail)]
        self._print("\n".join(lines), sys.stderr)

    def report(self, event: Event) -> None:
        """What a supervisor has to tell."""
        match event:
            case Started(service, pid):
                self.say(f"{service:<9} started, process {pid}")
            case Died(service, how, log_tail, restart_in_s):
                self.complain(
                    f"{service:<9} died ({how}); next start in {restart_in_s:g} s", log_tail
                )
            case Respawned(service, how, log_tail):
                self.complain(
                    f"{service:<9} died ({how}); it is started again", errors_in(log_tail)
                )
            case Back(service, after_s):
                self.say(f"{service:<9} is back after {after_s:.1f} s")
            case GaveUp(service, how, _):
                self.complain(f"{service:<9} cannot run ({how}), and a restart would not mend it")
            case Stopped(service, how, killed):
                if killed:
                    self.complain(f"{service:<9} had to be killed")
                else:
                    self.say(f"{service:<9} stopped ({how})")

    def conclude(self, failure: Failure) -> None:
        """The last word, where a service cannot run: which one, and its own reason."""
        reason = errors_in(failure.log_tail) or failure.log_tail
        self.complain(f"error: {failure.service} cannot run ({failure.how}):", reason)

    def _print(self, text: str, stream: TextIO) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # nobody reads any more, which is no reason to stop serving
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
