"""Random walks of the scheduler core, one after the other, until there are enough steps.

A walk that fails is repeated with ever fewer of its events. Then the command that repeats the
shortest failing one is printed:

    python -m tests.support.walks.run --first-seed 1 --steps 500000
    python -m tests.support.walks.run --seed 17 --keep 0-3,9
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.walks.walk import Walk

_NUM_EVENTS = 400
_MAX_ATTEMPTS = 400  # walks for shortening


def failure(seed: int, kept: Sequence[int] | None = None) -> str | None:
    """The failure of a walk, or None."""
    try:
        Walk(seed, _NUM_EVENTS).run(None if kept is None else frozenset(kept))
    except Exception:
        return traceback.format_exc()
    return None


def shortest(seed: int) -> list[int]:
    """The fewest events of a walk that still fail, found by removing parts, then smaller parts."""
    kept = list(range(_NUM_EVENTS))
    size = len(kept) // 2
    attempts = 0
    while size and attempts < _MAX_ATTEMPTS:
        first = 0
        while first < len(kept) and attempts < _MAX_ATTEMPTS:
            fewer = kept[:first] + kept[first + size :]
            attempts += 1
            if failure(seed, fewer) is not None:
                kept = fewer
            else:
                first += size
        size //= 2
    return kept


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: 0,1,2,5 is 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs) or "none"


def numbers(text: str) -> list[int]:
    """Numbers from the text that ``ranges`` wrote."""
    found: list[int] = []
    for part in [] if text == "none" else text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def walk_on(first_seed: int, num_steps: int) -> Counter[str] | int:
    """Totals of all walks, or the seed of the first one that fails."""
    totals: Counter[str] = Counter()
    seed = first_seed
    while totals["steps"] < num_steps:
        walk = Walk(seed, _NUM_EVENTS)
        try:
            walk.run()
        except Exception:
            return seed
        tightest = max(totals["tightness"], walk.counts["tightness"])
        totals.update(walk.counts)
        totals["tightness"] = tightest
        totals["walks"] += 1
        seed += 1
    return totals


def report(seed: int) -> str:
    """The failure of the shortest failing walk, and the command to repeat it."""
    kept = shortest(seed)
    command = f"python -m tests.support.walks.run --seed {seed} --keep {ranges(kept)}"
    found = failure(seed, kept)
    return f"{found}\nwalk {seed} fails, with {len(kept)} of its events:\n    {command}"


def main() -> None:
    """Print totals as JSON; exit with 1 if a walk fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.walks.run")
    parser.add_argument("--first-seed", type=int, default=0, help="of many walks")
    parser.add_argument("--steps", type=int, default=100_000, help="plans of all walks together")
    parser.add_argument("--seed", type=int, help="of a single walk")
    parser.add_argument("--keep", type=numbers, help="indices of the events that happen in it")
    parser.add_argument("--out", type=Path, help="file for the totals, instead of the terminal")
    args = parser.parse_args()
    if args.seed is not None:
        found = failure(args.seed, args.keep)
        sys.exit(found or 0)
    began = time.perf_counter()
    totals = walk_on(args.first_seed, args.steps)
    if isinstance(totals, int):
        sys.exit(report(totals))
    said = json.dumps({**totals, "seconds": round(time.perf_counter() - began)})
    if args.out is None:
        print(said)
        return
    part = args.out.with_suffix(".part")  # renamed, so that readers see all of it or nothing
    part.write_text(said)
    part.rename(args.out)


if __name__ == "__main__":
    main()
