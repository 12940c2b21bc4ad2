"""Averages over time are integrals."""

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.baselines.faster_transformer import FasterTransformer
from benchmarks.baselines.orca import Orca, Reservation
from benchmarks.simulator.findings.memory_use import HeldMemory
from benchmarks.simulator.pagestream import PageStream
from benchmarks.simulator.system import MemoryUse, System
from benchmarks.simulator.virtual_clock import run_many
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from benchmarks.simulator.workloads import Workload

WORKER = WorkerModel(find_model("OPT-13B"), find_gpu("A100-40G"))


def test_each_use_counts_as_long_as_it_lasts() -> None:
    held = HeldMemory([Orca(100, Reservation.MAX), Orca(300, Reservation.MAX)])
    held.changes(0, 1.0, MemoryUse(100, 10, 20, 30, 15, 25, shared=12))
    held.changes(1, 3.0, MemoryUse(300, 300, 0, 0, 0, 0))
    held.close(4.0)
    shares = held.shares
    assert shares["token_states"] == pytest.approx((3 * 10 + 300) / 1_600)
    assert shares["reserved"] == pytest.approx(3 * 20 / 1_600)
    assert shares["internal"] == pytest.approx(3 * 30 / 1_600)
    assert shares["external"] == pytest.approx(3 * 15 / 1_600)
    assert shares["free"] == pytest.approx((100 + 3 * 25 + 3 * 300) / 1_600)
    assert held.saved == pytest.approx(3 * 12 / (3 * 12 + 3 * 60 + 300))


def test_a_run_that_took_no_time_has_no_shares() -> None:
    held = HeldMemory([Orca(100, Reservation.MAX)])
    held.close(0.0)
    assert set(held.shares.values()) == {0.0}
    assert held.saved == 0.0


@pytest.mark.parametrize(
    "systems",
    [
        [PageStream(WORKER), PageStream(WORKER)],
        [Orca(15_700, Reservation.POW2)],
        [FasterTransformer(15_700, 2_048)],
    ],
    ids=["pagestream", "orca", "faster-transformer"],
)
def test_shares_are_what_looking_again_and_again_comes_to(systems: Sequence[System]) -> None:
    asked = Workload("alpaca-like", 2_048).requests(4.0, 10.0, seed=3)
    outcome = run_many(systems, asked, WORKER, until_s=15.0, sample_every_s=0.002)
    total = sum(moment.memory.total for moment in outcome.moments)
    for part, share in outcome.mean_memory.items():
        looked = sum(getattr(moment.memory, part) for moment in outcome.moments)
        assert share == pytest.approx(looked / total, abs=1e-3)
    assert np.isclose(sum(outcome.mean_memory.values()), 1.0)
