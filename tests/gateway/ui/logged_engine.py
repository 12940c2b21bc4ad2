"""A scheduler core with a worker, whose logs are on the bus of a gateway."""

from typing import Any

from shared.bus.api import Append
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from tests.support.viewed_engine import ViewedEngine

KEYS = EngineKeys("engine-0")


class LoggedEngine:
    """An engine whose logs are on a bus."""

    def __init__(self, bus: MemoryBus, epoch: int, **changes: Any) -> None:
        self.engine = ViewedEngine(epoch, **changes)
        self._bus = bus
        self._written = [0, 0, 0]

    async def write(self) -> None:
        """Append what is new."""
        engine = self.engine
        logs = (engine.plans, engine.outputs, engine.snapshots)
        for index, name in enumerate((KEYS.plans, KEYS.outputs, KEYS.snapshots)):
            for entry in logs[index][self._written[index] :]:
                append = Append(name, list(entry.messages), entry.id.epoch, entry.id.seq)
                await self._bus.append(append)
            self._written[index] = len(logs[index])
