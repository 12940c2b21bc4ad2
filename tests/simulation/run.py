"""Many runs, or one with all that happened in it: python -m tests.simulation.run --seeds 1000."""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.simulate import Run, simulate

_BATCH = 50


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
    if options.processes == 1:
        run = partial(simulate, trace=print if options.trace else None)
        runs = list(map(run, seeds))
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            runs = list(pool.map(simulate, seeds, chunksize=_BATCH))
    _report(runs, time.monotonic() - began_s)
    return int(any(run.failures for run in runs))


def _report(runs: list[Run], spent_s: float) -> None:
    failed = [run for run in runs if run.failures]
    for run in failed[:20]:
        print(f"FAILED seed {run.seed}: {'; '.join(run.failures)}\n  {run.command}")
    kinds = Counter(run.num_faults for run in runs)
    print(
        f"{len(runs)} runs, {len(failed)} failed; {sum(run.num_faults for run in runs)} faults "
        f"({dict(sorted(kinds.items()))} runs by number), "
        f"{sum(run.num_errors for run in runs)} streams ended with an error, "
        f"{sum(run.num_callbacks for run in runs)} callbacks, "
        f"{sum(run.virtual_s for run in runs):.0f} virtual s in {spent_s:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
