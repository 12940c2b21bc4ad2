"""What came of many runs."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.simulation.simulate import Run


@dataclass(slots=True)
class Tally:
    """Counts that can be added up.

    Attributes:
        failures: a text for each run that failed, with the command that replays it.
        num_errors: streams that ended with an error, as they had to.
        spent_s: processor time.
        orders: hashes of the order of callbacks, one a run.
        histories: hashes of the order of writes and faults, one a run.
    """

    failures: list[str] = field(default_factory=list)
    num_errors: int = 0
    num_callbacks: int = 0
    virtual_s: float = 0.0
    spent_s: float = 0.0
    by_faults: Counter[int] = field(default_factory=Counter)
    orders: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)

    @property
    def num_runs(self) -> int:
        """So far."""
        return len(self.orders)

    @property
    def num_failed(self) -> int:
        """Of the runs."""
        return len(self.failures)

    def add(self, run: Run) -> None:
        """Count one more."""
        if run.failures:
            said = "; ".join(run.failures)
            self.failures.append(f"FAILED seed {run.seed}: {said}\n  {run.command}")
        self.num_errors += run.num_errors
        self.num_callbacks += run.num_callbacks
        self.virtual_s += run.virtual_s
        self.by_faults[run.num_faults] += 1
        self.orders.append(run.order)
        self.histories.append(run.history)

    def join(self, other: "Tally") -> None:
        """Count what another one has."""
        self.failures += other.failures
        self.num_errors += other.num_errors
        self.num_callbacks += other.num_callbacks
        self.virtual_s += other.virtual_s
        self.spent_s += other.spent_s
        self.by_faults += other.by_faults
        self.orders += other.orders
        self.histories += other.histories

    def save(self, path: Path) -> None:
        """All of it, in one file that is there as a whole or not at all."""
        unfinished = path.with_suffix(".part")
        with unfinished.open("wb") as file:
            np.savez(
                file,
                failures=np.array(self.failures, np.str_),
                counts=np.array([self.num_errors, self.num_callbacks], np.int64),
                times_s=np.array([self.virtual_s, self.spent_s], np.float64),
                faults=np.array(sorted(self.by_faults.items()), np.int64).reshape(-1, 2),
                orders=np.array(self.orders, np.uint64),
                histories=np.array(self.histories, np.uint64),
            )
        unfinished.rename(path)

    @staticmethod
    def load(path: Path) -> "Tally":
        """What ``save`` has kept."""
        with np.load(path) as found:
            return Tally(
                failures=found["failures"].tolist(),
                num_errors=int(found["counts"][0]),
                num_callbacks=int(found["counts"][1]),
                virtual_s=float(found["times_s"][0]),
                spent_s=float(found["times_s"][1]),
                by_faults=Counter(dict(found["faults"].tolist())),
                orders=found["orders"].tolist(),
                histories=found["histories"].tolist(),
            )

    def summary(self) -> str:
        """All of it in some lines."""
        num_faults = sum(count * runs for count, runs in self.by_faults.items())
        by_faults = dict(sorted(self.by_faults.items()))
        return (
            f"{self.num_runs:,} runs, {self.num_failed} failed; {self.spent_s:.0f} s of processor "
            f"time, {1e3 * self.spent_s / max(1, self.num_runs):.1f} ms each\n"
            f"{len(set(self.orders)):,} differ in the order of callbacks, "
            f"{len(set(self.histories)):,} in that of writes and faults\n"
            f"{num_faults:,} faults (runs by their number: {by_faults}), "
            f"{self.num_errors:,} streams ended with an error event\n"
            f"{self.num_callbacks:,} callbacks in a drawn order, {self.virtual_s:,.0f} virtual s"
        )
