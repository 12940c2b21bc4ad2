"""What a soak reports as a leak, and what it tolerates."""

from benchmarks.serving.processes import Held, Kept
from tests.chaos.soak.verdict import Sample, leaks, slope_per_min

MIB = 2**20
QUIET = Kept(used_bytes=2 * MIB, requests=5, plans=3, outputs=500, num_keys=6)


def sample(minute: int, redis: Kept = QUIET, idle: bool = True, **processes: Held) -> Sample:
    return Sample(float(minute), processes, redis, 1.0 if idle else None, "" if idle else "running")


def held(pid: int, mib: float, num_fds: int = 15) -> Held:
    return Held(pid, int(mib * MIB), num_fds, num_threads=3)


def test_what_warms_up_and_then_stays_is_no_leak() -> None:
    sizes = [50, 80, 100, 100.2, 100.1, 100.3, 100.2, 100.3]
    samples = [sample(n, worker=held(1, size)) for n, size in enumerate(sizes)]
    assert leaks(samples, 500) == []


def test_what_grows_and_grows_is_a_leak() -> None:
    samples = [sample(n, worker=held(1, 100 + n)) for n in range(8)]
    [found] = leaks(samples, 500)
    assert found == "worker of 107 MiB grows by 1.00 MiB a minute"


def test_memory_that_fluctuates_more_than_it_grows_is_no_leak() -> None:
    sizes = [168, 168, 223, 250, 211, 192, 235, 188, 182, 182, 300, 256, 217, 199, 247, 177, 185]
    sizes += [197, 259, 273, 269, 228, 262]
    samples = [sample(n, gateway=held(1, size)) for n, size in enumerate(sizes)]
    slope = slope_per_min([(float(n), held(1, size)) for n, size in enumerate(sizes)])
    assert slope is not None
    assert slope > 0.005 * 262 * MIB
    assert leaks(samples, 500) == []
    leaking = [sample(n, gateway=held(1, size + 20 * n)) for n, size in enumerate(sizes)]
    assert any("gateway" in found for found in leaks(leaking, 500))


def test_a_process_that_lived_for_minutes_only_has_no_slope() -> None:
    samples = [sample(n, gateway=held(1, 100 + 30 * n)) for n in range(6)]
    assert leaks(samples, 500) == []


def test_a_process_that_was_started_anew_begins_anew() -> None:
    samples = [sample(n, gateway=held(n // 3, 50 + 20 * (n % 3))) for n in range(12)]
    assert leaks(samples, 500) == []


def test_one_large_answer_between_two_samples_does_not_make_a_slope() -> None:
    life = [(float(n), held(1, 100 + 30 * (n == 5))) for n in range(9)]
    assert slope_per_min(life) == 0


def test_ever_more_descriptors_are_a_leak() -> None:
    samples = [sample(n, gateway=held(1, 100, 15 + 3 * n)) for n in range(8)]
    assert any("descriptors" in found for found in leaks(samples, 500))


def test_a_log_that_is_not_trimmed_is_a_leak() -> None:
    samples = [
        sample(n, redis=Kept(2 * MIB, requests=5, plans=3, outputs=500 * n, num_keys=6))
        for n in range(5)
    ]
    assert leaks(samples, 500)[0] == "minute 3.0: outputs has 1500 entries, more than 1300"


def test_data_of_redis_that_grows_is_a_leak() -> None:
    samples = [sample(n, redis=Kept(n * 4 * MIB, 5, 3, 500, 6)) for n in range(9)]
    assert leaks(samples, 500) == ["Redis keeps beside the logs 28.0 MiB, at first 8.0 MiB"]


def test_logs_that_fill_to_their_bounds_are_no_leak() -> None:
    samples = [
        sample(n, redis=Kept((2 + n * 4) * MIB, 5, 3, 500, 6, n * 4 * MIB)) for n in range(9)
    ]
    assert leaks(samples, 500) == []


def test_what_still_runs_without_requests_is_a_leak() -> None:
    samples = [sample(0), sample(1, idle=False)]
    assert leaks(samples, 500) == ["minute 1.0: not idle: running"]
