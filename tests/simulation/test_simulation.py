"""Any interleaving that a seed comes to: nothing is lost, repeated, changed or left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.run import BATCHES
from tests.simulation.simulate import simulate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", BATCHES)
def test_no_run_splices_loses_or_hangs(first: int) -> None:
    for seed in range(first, first + BATCHES.step):
        run = simulate(seed)
        assert not run.failures, f"{'; '.join(run.failures)}\n{run.command}"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_run_of_several_ranks_splices_loses_or_hangs(num_ranks: int) -> None:
    for seed in range(60):
        run = simulate(seed, num_ranks=num_ranks)
        assert not run.failures, f"{'; '.join(run.failures)}\n{run.command}"


def test_a_run_is_replayed_exactly_whatever_order_sets_of_strings_have() -> None:
    script = (
        "import hashlib\n"
        "from tests.simulation.simulate import simulate\n"
        "lines = []\n"
        "for seed in range(40):\n"
        "    simulate(seed, trace=lines.append)\n"
        "print(hashlib.sha256('\\n'.join(lines).encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("0", "1", "2")
    }
    assert len(found) == 1


def test_the_command_of_a_run_prints_its_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.run", "--first", "7", "--trace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "worker-1 starts" in done.stdout
    assert "1 runs, 0 failed" in done.stdout
