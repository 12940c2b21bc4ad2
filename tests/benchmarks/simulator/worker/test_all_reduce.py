"""The constants of all-reduces reproduce the published measurements that they were fitted to."""

import pytest

from benchmarks.simulator.worker.all_reduce import AllReduce, one_shot, ring

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_gpus", "mib", "one_shot_us", "ring_us"),
    [  # vLLM's pull requests 24111 (2, 4 and 6 GPUs), 24532 (4) and 42324 (8), H100
        (2, 0.5, 7, None),
        (4, 0.5, 10, 21),
        (4, 1, 14, 23),
        (4, 2, 23, 28),
        (4, 4, 38, 39),
        (6, 0.5, 13, 23),
        (6, 4, 70, 53),
        (8, 0.5, None, 24),
        (8, 4, None, 50),
        (8, 64, None, 316),
    ],
)
def test_durations_are_near_the_measured_ones(
    num_gpus: int, mib: float, one_shot_us: float | None, ring_us: float | None
) -> None:
    if one_shot_us is not None:
        found = 1e6 * one_shot(num_gpus).seconds(mib * _MIB)
        assert found == pytest.approx(one_shot_us, rel=0.1)
    if ring_us is not None:
        assert 1e6 * ring(num_gpus).seconds(mib * _MIB) == pytest.approx(ring_us, rel=0.25)


def test_a_ring_sends_less_and_begins_later() -> None:
    for num_gpus in (4, 8):
        assert one_shot(num_gpus).seconds(1 << 10) < ring(num_gpus).seconds(1 << 10)
        assert one_shot(num_gpus).seconds(1 << 27) > ring(num_gpus).seconds(1 << 27)


def test_a_duration_is_a_latency_and_bytes() -> None:
    assert AllReduce(2.0, 0.5).seconds(6) == 5.0
