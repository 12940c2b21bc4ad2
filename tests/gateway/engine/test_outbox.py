"""What waits while the bus is away is appended in order, in entries of a bounded size."""

import asyncio
import time

import numpy as np

from gateway.engine.outbox import Outbox
from shared.bus.api import START, Append, EntryId
from shared.bus.memory import MemoryBus
from shared.codec import decode
from shared.errors import BusUnavailable
from shared.messages.requests import Attach, ChoiceView, Stop
from shared.tasks import cancel_until_done


class AwayBus(MemoryBus):
    """Takes nothing at first."""

    num_refused = 0

    async def append(self, append: Append) -> EntryId:
        if self.num_refused < 2:
            self.num_refused += 1
            raise BusUnavailable("connection refused")
        return await super().append(append)


async def test_a_backlog_is_appended_in_entries_of_bounded_size() -> None:
    bus = AwayBus(lambda: time.time_ns() // 1_000_000)
    outbox = Outbox(bus, "log", lambda: None)
    view = ChoiceView(np.zeros(100_000, np.int32), "")  # 400 kB
    stops = [Stop(f"r{number}", 0, 1) for number in range(150)]
    attaches = [Attach(f"a{n}", "g", "x", None, (view,), exact=False) for n in range(5)]
    for message in (*stops, *attaches):
        outbox.send(message)
    running = asyncio.create_task(outbox.run())
    async with asyncio.timeout(10):
        await outbox.flushed()
    await cancel_until_done(running)
    entries = (await bus.read({"log": START}, 0, 100))["log"]
    found = [decode(data) for entry in entries for data in entry.messages]
    assert found == [*stops, *attaches]
    assert [len(entry.messages) for entry in entries] == [64, 64, 24, 2, 1]
