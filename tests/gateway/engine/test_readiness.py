"""Readiness comes from progress."""

import asyncio
import time
from collections.abc import Callable, Mapping

import httpx

from gateway.engine.engine_status import Engine
from shared.bus.api import Entry, EntryId
from shared.bus.memory import MemoryBus
from shared.messages.leases import PROTOCOL
from tests.gateway.conftest import MakeStage


async def test_an_engine_without_steps_makes_the_gateway_unready_with_the_reason(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(max_stall=3.0)
    engine = stage.model.engine
    for stalled_ms, status in ((2_900, 200), (3_100, 503), (0, 200)):
        await stage.engine.publish(stalled_ms=stalled_ms)
        await stage.until(lambda wanted=stalled_ms: engine.status.stalled_ms == wanted)  # type: ignore[misc]
        ready = await stage.http.get("/health/ready")
        assert ready.status_code == status
        if status == 503:
            assert ready.json()["check"] == "steps"
            assert "3100 ms" in ready.json()["detail"]
            assert "retry-after" in ready.headers


async def test_an_engine_of_another_protocol_gets_no_requests(make_stage: MakeStage) -> None:
    stage = await make_stage()
    await stage.engine.publish(protocol=PROTOCOL + 1)
    await stage.until(lambda: not isinstance(stage.model.engine.status, Engine))
    ready, refused = await stage.http.get("/health/ready"), await stage.complete()
    assert (ready.status_code, refused.status_code) == (503, 503)
    assert f"the scheduler speaks protocol {PROTOCOL + 1}" in ready.json()["detail"]


class HeldBus(MemoryBus):
    """A bus on which reading outputs may take as long as a test likes."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        super().__init__(clock_ms)
        self.open = asyncio.Event()
        self.open.set()
        self.num_held = 0

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        if not self.open.is_set() and any(name.endswith("outputs") for name in cursors):
            self.num_held += 1
            await self.open.wait()
        return await super().read(cursors, block_ms, max_entries)


async def test_a_log_that_is_not_read_while_a_client_waits_makes_the_gateway_unready(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(bus=HeldBus(lambda: time.time_ns() // 1_000_000), max_log_lag=5.0)
    engine = stage.model.engine
    engine._last_read_s = time.monotonic() - 60
    assert engine.log_lag_s == 0.0, "no client waits"
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    await stage.until(lambda: engine.log_lag_s < 5.0)  # it reads on
    bus = stage.engine.bus
    assert isinstance(bus, HeldBus)
    bus.open.clear()
    await stage.until(lambda: bus.num_held > 0)
    engine._last_read_s -= 60
    ready = await stage.http.get("/health/ready")
    assert (ready.status_code, ready.json()["check"]) == (503, "log")
    assert (await stage.http.get("/health/live")).status_code == 200
    deadline = time.monotonic() + 5
    while "outputs_lag_seconds{" not in (text := (await stage.http.get("/metrics")).text) or not (
        float(text.partition("outputs_lag_seconds{")[2].split()[1]) > 50
    ):
        assert time.monotonic() < deadline
    bus.open.set()
    await stage.engine.generate(submit, [5])
    assert (await waiting).status_code == 200
    assert (await stage.http.get("/health/ready")).status_code == 200


async def test_the_failed_check_is_named(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False)
    assert (await stage.http.get("/health/ready")).json()["check"] == "engine"
    stage.server.service.draining = True
    assert (await stage.http.get("/health/ready")).json()["check"] == "gateway"


async def test_the_port_for_machines_needs_no_key_and_serves_no_model(
    make_stage: MakeStage, unused_tcp_port: int
) -> None:
    stage = await make_stage(
        gateway_metrics_port=unused_tcp_port, api_key="a key of some length", ready=True
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}") as machine:
        assert "pagestream:open_streams" in (await machine.get("/metrics")).text
        assert (await machine.get("/health/live")).json() == {"status": "alive"}
        assert (await machine.get("/health/ready")).json() == {"status": "ready"}
        assert (await machine.get("/v1/models")).status_code == 404
    assert (await stage.http.get("/metrics")).status_code == 401
