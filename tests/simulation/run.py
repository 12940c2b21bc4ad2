"""Many runs, or one with all that happened in it.

    python -m tests.simulation.run --seeds 1000
    python -m tests.simulation.run --seeds 1000000 --jobs 2 --folder /tmp/million
    python -m tests.simulation.run --first 7 --trace

With a folder, what was run is kept there, batch by batch: the same command goes on where it was
stopped, and prints in the end how many of all runs differ.
"""

import argparse
import gc
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path

from tests.simulation.display import Display
from tests.simulation.simulate import Run, simulate
from tests.simulation.tally import Tally

_BATCH = 500  # runs
BATCHES = range(0, 1_000, 200)  # first seeds of what the tests run

Simulate = Callable[[int], Run]


def main() -> int:
    """Print failures with the commands that replay them; 1 if there are any."""
    options = _parsed()
    seeds = range(options.first, options.first + options.seeds)
    if options.trace:
        total = Tally()
        for seed in seeds:
            total.add(simulate(seed, trace=print, num_ranks=options.ranks))
    else:
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
        run = partial(simulate, num_ranks=options.ranks)
        total = _run_all(run, _batches(seeds), options.jobs, options.folder)
    print(total.summary())
    return int(total.num_failed > 0)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs")
    parser.add_argument("--ranks", type=int, default=1, help="workers of the engine")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--folder", type=Path, help="where to keep what was run")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    return parser.parse_args()


def _batches(seeds: range) -> list[range]:
    """Equal ones from fixed seeds on, so that another call finds them again."""
    ends = range(seeds.start - seeds.start % _BATCH + _BATCH, seeds.stop + _BATCH, _BATCH)
    return [range(max(seeds.start, end - _BATCH), min(seeds.stop, end)) for end in ends]


def _run_all(run: Simulate, batches: Sequence[range], num_jobs: int, folder: Path | None) -> Tally:
    total = Tally()
    left = []
    for batch in batches:
        path = _path(batch, folder)
        if path is not None and path.exists():
            total.join(Tally.load(path))
        else:
            left.append(batch)
    if total.num_runs:
        print(f"{total.num_runs:,} runs are known", *total.failures, sep="\n", flush=True)
    with Display(total, sum(map(len, batches))) as display:
        for tally in _tallies(run, left, num_jobs, folder):
            total.join(tally)
            display.update(tally.failures)
    return total


def _tallies(
    run: Simulate, batches: Sequence[range], num_jobs: int, folder: Path | None
) -> Iterator[Tally]:
    if num_jobs == 1:
        yield from (_run_batch(run, batch, folder) for batch in batches)
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        left = iter(batches)
        waiting: set[Future[Tally]] = set()
        while True:
            for batch in itertools.islice(left, 2 * num_jobs - len(waiting)):
                waiting.add(pool.submit(_run_batch, run, batch, folder))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (found.result() for found in done)


def _run_batch(run: Simulate, seeds: range, folder: Path | None) -> Tally:
    tally = Tally()
    began_s = time.process_time()
    logging.disable(logging.CRITICAL)
    gc.disable()  # cycles are looked for between batches
    try:
        for seed in seeds:
            tally.add(run(seed))
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    gc.collect()
    tally.spent_s = time.process_time() - began_s
    if (path := _path(seeds, folder)) is not None:
        tally.save(path)
    return tally


def _path(batch: range, folder: Path | None) -> Path | None:
    return None if folder is None else folder / f"{batch.start}-{batch.stop}.npz"


if __name__ == "__main__":
    sys.exit(main())
