"""How far many runs have got, and when they will be done."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tests.simulation.tally import Tally

_LINE_S = 60.0  # between lines where there is no terminal


class Display:
    """A progress bar in a terminal, a line now and then elsewhere.

    Args:
        total: what there is so far; the caller adds to it.
        num_wanted: runs in all.
    """

    def __init__(self, total: Tally, num_wanted: int) -> None:
        self._total = total
        self._num_wanted = num_wanted
        self._num_known = total.num_runs
        self._began_s = self._said_s = time.monotonic()
        console = Console(file=sys.stderr)
        self._is_watched = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_watched,
        )
        self._task = self._bar.add_task("runs", total=num_wanted, completed=total.num_runs)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, failures: list[str]) -> None:
        """Some more are done; these have failed."""
        for text in failures:
            self._bar.console.print(text) if self._is_watched else print(text, flush=True)
        num_runs, num_failed = self._total.num_runs, self._total.num_failed
        self._bar.update(self._task, completed=num_runs, description=f"{num_failed} failed")
        now_s = time.monotonic()
        if not self._is_watched and now_s - self._said_s >= _LINE_S:
            self._said_s = now_s
            rate = (num_runs - self._num_known) / (now_s - self._began_s)
            left_min = (self._num_wanted - num_runs) / rate / 60
            print(
                f"{num_runs:,} of {self._num_wanted:,} runs, {num_failed} failed, "
                f"{rate:.0f} runs/s, {left_min:.0f} min left",
                flush=True,
            )
