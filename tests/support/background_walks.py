"""Random walks in processes of their own, beside all other tests: they take long, and wait for
nobody.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


class BackgroundWalks:
    """Walks of so many steps in each of several processes of the lowest priority."""

    def __init__(self, num_processes: int, steps_each: int) -> None:
        self._processes = [
            subprocess.Popen(
                [
                    *("nice", "-n", "19"),
                    *(sys.executable, "-W", "error", "-m", "tests.support.random_walks"),
                    *("--first-seed", str(number * 1_000_000), "--steps", str(steps_each)),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(num_processes)
        ]

    def totals(self, deadline_s: float) -> Counter[str]:
        """What all of them have seen, once they have ended well."""
        ends = time.monotonic() + deadline_s
        found: Counter[str] = Counter()
        for process in self._processes:
            said, _ = process.communicate(timeout=max(1, ends - time.monotonic()))
            assert process.returncode == 0, said
            found.update(json.loads(said))
        return found

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
