"""What the launcher says, and to whom."""

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from deploy.supervisor import Back, Died, Event, GaveUp, Respawned, Started, Stopped


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
            case Respawned(service, how):
                self.complain(f"{service:<9} died ({how}); it is started again")
            case Back(service, after_s):
                self.say(f"{service:<9} is back after {after_s:.1f} s")
            case GaveUp(service, how, log_tail):
                self.complain(
                    f"{service:<9} cannot run ({how}), and a restart would not mend it:", log_tail
                )
            case Stopped(service, how, killed):
                if killed:
                    self.complain(f"{service:<9} had to be killed")
                else:
                    self.say(f"{service:<9} stopped ({how})")

    def _print(self, text: str, stream: TextIO) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # nobody reads any more, which is no reason to stop serving
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
