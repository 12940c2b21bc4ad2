"""What the launcher and containers learn of an engine from its lease."""

import asyncio
from dataclasses import replace

import pytest

from deploy.health import is_engine_ready
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.codec import encode
from shared.messages.leases import EngineInfo
from tests.gateway.fake_engine import INFO


def publish(redis_url: str, info: EngineInfo) -> None:
    async def put() -> None:
        bus = RedisBus(redis_url)
        await bus.put(EngineKeys(info.engine_id).info, encode(info), 60_000)
        await bus.close()

    asyncio.run(put())


@pytest.mark.parametrize(
    ("info", "is_ready"),
    [
        (INFO, True),
        (replace(INFO, state="starting"), False),
        (replace(INFO, draining=True), False),
        (replace(INFO, engine_id="another"), False),
    ],
)
def test_an_engine_is_ready_when_its_own_lease_says_so(
    redis_url: str, info: EngineInfo, is_ready: bool
) -> None:
    publish(redis_url, info)
    assert is_engine_ready(redis_url, "engine-0") == is_ready
