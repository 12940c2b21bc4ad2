"""The bus of these tests."""

import time

import pytest

from shared.bus.memory import MemoryBus


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(lambda: time.time_ns() // 1_000_000)
