"""Random walks in processes of their own, beside all other tests: they take long.

Where several processes run the tests, one of them starts the walks; all read the results from a
folder.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
NUM_PROCESSES = 2
STEPS_EACH = 500_000
_LOOK_S = 0.2


class BackgroundWalks:
    """Walks of many steps in several processes of the lowest priority.

    Args:
        folder: of the walks' results; one per run of the tests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the walks; once per folder."""
        for number in range(NUM_PROCESSES):
            with self._log(number).open("w") as log:
                process = subprocess.Popen(
                    [
                        *("nice", "-n", "19"),
                        *(sys.executable, "-W", "error", "-m", "tests.support.walks.run"),
                        *("--first-seed", str(number * 1_000_000), "--steps", str(STEPS_EACH)),
                        *("--out", str(self._totals(number))),
                    ],
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)

    def totals(self, deadline_s: float) -> Counter[str]:
        """The totals of all walks, once they have ended without an error."""
        ends = time.monotonic() + deadline_s
        found: Counter[str] = Counter()
        for number in range(NUM_PROCESSES):
            while not self._totals(number).exists():
                said = self._log(number).read_text() if self._log(number).exists() else ""
                assert not said, said  # they print only failures
                assert time.monotonic() < ends, f"walks are not done after {deadline_s} s"
                time.sleep(_LOOK_S)  # polling interval of the condition
            found.update(json.loads(self._totals(number).read_text()))
        return found

    def stop(self) -> None:
        """End the walks that were started here and still run."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _totals(self, number: int) -> Path:
        return self._folder / f"walks-{number}.json"

    def _log(self, number: int) -> Path:
        return self._folder / f"walks-{number}.log"
