"""The limit of a process's memory."""

import resource

from gpu_worker.model.memory_limit import memory_limit


def test_a_limit_of_the_process_counts() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    less = memory_limit() - 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (less, before[1]))
    try:
        assert memory_limit() == less
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
