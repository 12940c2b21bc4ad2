"""Many runs, or one with all that happened in it: python -m tests.simulation.run --seeds 1000."""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.simulate import Run, simulate

_BATCH = 50
BATCHES = range(0, 150, 25)  # first seeds of what the tests run


def main() -> int:
    """Print failures with the commands that replay them; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings are iterated in an order that only this fixes.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]])
    began_s = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    total = Total()
    if options.processes == 1:
        for seed in seeds:
            total.add(simulate(seed, trace=print if options.trace else None))
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            for run in pool.map(simulate, seeds, chunksize=_BATCH):
                total.add(run)
    total.print(time.monotonic() - began_s)
    return int(total.num_failed > 0)


@dataclass(slots=True)
class Total:
    """What came of many runs."""

    num_runs: int = 0
    num_failed: int = 0
    num_errors: int = 0
    num_callbacks: int = 0
    virtual_s: float = 0.0
    by_faults: Counter[int] = field(default_factory=Counter)

    def add(self, run: Run) -> None:
        """Count one, and tell at once if it failed."""
        self.num_runs += 1
        self.num_failed += bool(run.failures)
        self.num_errors += run.num_errors
        self.num_callbacks += run.num_callbacks
        self.virtual_s += run.virtual_s
        self.by_faults[run.num_faults] += 1
        if run.failures:
            print(f"FAILED seed {run.seed}: {'; '.join(run.failures)}\n  {run.command}", flush=True)

    def print(self, spent_s: float) -> None:
        """All of it in some lines."""
        num_faults = sum(count * runs for count, runs in self.by_faults.items())
        print(
            f"{self.num_runs} runs, {self.num_failed} failed, in {spent_s:.1f} s\n"
            f"{num_faults} faults (runs by their number: {dict(sorted(self.by_faults.items()))}), "
            f"{self.num_errors} streams ended with an error that says so\n"
            f"{self.num_callbacks} callbacks in a drawn order, {self.virtual_s:.0f} virtual s"
        )


if __name__ == "__main__":
    sys.exit(main())
