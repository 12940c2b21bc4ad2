"""Engines that join a gateway's fleet by their leases."""

from dataclasses import replace

import pytest

from gateway.engine.client import EngineClient
from gateway.fleet.members import Members
from shared.bus.redis_bus import RedisBus
from shared.metrics import ModelMetrics
from tests.gateway.fake_engine import INFO


async def test_a_lease_with_a_url_that_cannot_be_used_keeps_its_engine_out_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = ModelMetrics("demo", "fleet")
    members = Members(
        RedisBus.of_engine,
        lambda bus, engine_id, _: EngineClient(bus, engine_id, "demo", "gateway", metrics),
        lambda engine_id, request_id: None,
    )
    urls = {"a": "redis+nonsense://:secret@h", "b": "redis+cluster://h:7000", "c": "redis://h?x=1"}
    leases = {name: replace(INFO, engine_id=name, redis_url=url) for name, url in urls.items()}
    for now_s in (1.0, 2.0):
        members.update(leases, now_s)
    assert [*members.by_id] == ["b"]
    assert caplog.text.count("engine not joined") == 2
    assert "secret" not in caplog.text
    await members.close()
