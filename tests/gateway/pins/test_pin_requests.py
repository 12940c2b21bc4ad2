"""Prefixes are sent to every epoch until its lease lists them, and not again after that."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.pins.pin_requests import Pinning, Prefix
from shared.messages.leases import PrefixState, PrefixStatus
from shared.messages.requests import Pin
from tests.gateway.conftest import MakeStage
from tests.gateway.fake_engine import INFO


def prefix(first: int = 3, cache_salt: str = "") -> Prefix:
    return Prefix(f"prefix {first}", np.arange(first, first + 40, dtype=np.int32), cache_salt)


def status(found: Prefix, state: str = PrefixState.PINNED) -> PrefixStatus:
    return PrefixStatus(found.prefix_id, state, 2)


def test_a_pin_is_sent_until_the_engine_has_the_prefix() -> None:
    found = prefix()
    pinning = Pinning([found])
    assert pinning.due(INFO, 0.0) == [Pin(found.prefix_id, found.name, found.tokens, "")]
    assert pinning.due(INFO, 29.0) == [], "it may be on its way"
    assert len(pinning.due(INFO, 31.0)) == 1, "it was lost"
    knows = replace(INFO, prefixes=(status(found),))
    assert pinning.due(knows, 100.0) == []
    assert pinning.state_of(found) == PrefixState.PINNED


def test_a_prefix_that_was_given_up_is_named_again_and_a_refused_one_is_not() -> None:
    given_up, refused = prefix(3), prefix(50)
    pinning = Pinning([given_up, refused])
    assert len(pinning.due(INFO, 0.0)) == 2
    states = (status(given_up), status(refused, PrefixState.REFUSED))
    assert pinning.due(replace(INFO, prefixes=states), 40.0) == []
    [again] = pinning.due(replace(INFO, prefixes=states[1:]), 80.0)
    assert again.prefix_id == given_up.prefix_id
    assert pinning.state_of(refused) == PrefixState.REFUSED
    assert pinning.state_of(given_up) == PrefixState.PENDING


def test_pins_are_sent_to_a_new_epoch_at_once() -> None:
    pinning = Pinning([prefix()])
    assert len(pinning.due(INFO, 0.0)) == 1
    assert len(pinning.due(replace(INFO, epoch=INFO.epoch + 1), 0.5)) == 1


def test_many_prefixes_do_not_come_all_at_once() -> None:
    pinning = Pinning([prefix(first) for first in range(40)])
    counts = [len(pinning.due(INFO, 0.5 * look)) for look in range(4)]
    assert counts == [16, 16, 8, 0]


def test_tokens_that_the_model_lacks_are_never_sent(caplog: pytest.LogCaptureFixture) -> None:
    good, foreign = prefix(), prefix(4_090)
    pinning = Pinning([foreign, good])
    with caplog.at_level("ERROR", "gateway.pins.pin_requests"):
        assert [pin.prefix_id for pin in pinning.due(INFO, 0.0)] == [good.prefix_id]
        assert pinning.due(INFO, 1.0) == []
    [record] = caplog.records
    assert "4129" in str(record.fields)  # type: ignore[attr-defined]
    assert pinning.state_of(foreign) == PrefixState.REFUSED


async def test_a_gateway_sends_its_prefixes_to_every_epoch_and_shows_them(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    file = tmp_path / "prefixes"
    file.write_text('{"tokens": [5, 6, 7], "name": "short", "cache_salt": "secret"}\n')
    stage = await make_stage(pinned_prefixes=str(file))
    found = await stage.engine.read()
    assert isinstance(found, Pin)
    assert (found.name, found.tokens.tolist(), found.cache_salt) == (
        "short",
        [5, 6, 7],
        "secret",
    )
    await stage.engine.start_epoch()
    await stage.engine.publish()
    assert await stage.engine.read() == found
    card = {
        "id": found.prefix_id,
        "object": "prefix",
        "model": "demo",
        "name": "short",
        "num_tokens": 3,
    }

    async def shown() -> object:
        return (await stage.http.get("/prefixes")).json()

    assert await shown() == {"object": "list", "data": [{**card, "state": "pending"}]}
    pinned = PrefixStatus(found.prefix_id, PrefixState.PINNED, 1)
    await stage.engine.publish(prefixes=(pinned,))
    pinning = stage.model.engine.pinning
    await stage.until(lambda: pinning.state_of(pinning.prefixes[0]) == PrefixState.PINNED)
    assert await shown() == {"object": "list", "data": [{**card, "state": "pinned"}]}
