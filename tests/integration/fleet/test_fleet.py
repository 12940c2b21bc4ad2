"""Several engines behind one gateway: requests are routed, and go on elsewhere when theirs ends."""

import asyncio
from dataclasses import replace

import msgpack
import pytest

from gateway.engine.event_queue import ServerStopping
from gateway.engine.events import Attached
from gateway.fleet.fleet import Fleet
from tests.integration.fleet_stage import (
    DEADLINE_S,
    LONG,
    Stage,
    Stream,
    engine_of,
    fleet_of,
    memory_bus,
    stream,
    text_after,
    until,
)


async def test_requests_with_a_common_beginning_share_an_engine_and_others_are_spread() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        first = stream(0, list(range(1, 200)), max_tokens=2)
        await fleet.submit([first.submit], first.queue)
        await first.follow()
        again = stream(1, list(range(1, 230)), max_tokens=2)
        await fleet.submit([again.submit], again.queue)
        route = fleet.route_of(again.submit.request_id)
        assert "reason=prefix" in route
        assert "expected_tokens=192" in route
        assert engine_of(fleet, again) == engine_of(fleet, first)
        await again.follow()
        others = [stream(number, [number * 7] * 40) for number in range(2, 10)]
        for one in others:
            await fleet.submit([one.submit], one.queue)
        assert {engine_of(fleet, one) for one in others} == {"a", "b"}


async def test_a_turn_through_another_gateway_goes_to_the_engine_of_the_turn_before() -> None:
    async with fleet_of("a", "b", num_gateways=2) as stage:
        first, second = stage.gateways
        one = stream(0, list(range(1, 200)), max_tokens=2)
        await first.submit([one.submit], one.queue)
        engine = engine_of(first, one)
        await until(lambda: len(second._router._index))
        turn = stream(1, list(range(1, 230)), max_tokens=2)
        await second.submit([turn.submit], turn.queue)
        assert engine_of(second, turn) == engine
        assert "expected_tokens=192" in second.route_of(turn.submit.request_id)
        await asyncio.gather(one.follow(), turn.follow())
        third = await stage.add_gateway()
        await until(lambda: len(third._members.ready()) == 2 and len(third._router._index))
        later = stream(2, list(range(1, 240)), max_tokens=2)
        await third.submit([later.submit], later.queue)
        assert engine_of(third, later) == engine, "a gateway that starts reads the earlier choices"


async def test_streams_of_an_engine_that_drains_go_on_in_others_token_for_token() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(12)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        mine = [one for one in streams if engine_of(fleet, one) == "a"]
        await asyncio.gather(*(one.follow(least=20) for one in streams))
        late = stream(99)
        await asyncio.gather(
            stage.engines["a"].drain(),
            fleet.submit([late.submit], late.queue),
            *(one.follow() for one in streams),
        )
        await late.follow()
        assert mine, "some were there"
        for one in [*streams, late]:
            assert (one.error, one.reason) == ("", "length")
            assert one.tokens == text_after(one.prompt, LONG)
        assert all(engine_of(fleet, one) == "b" for one in mine)
        assert fleet._metrics.moved_requests["released"]._value.get() >= len(mine)


async def test_streams_of_an_engine_that_is_lost_go_on_in_others_token_for_token() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(8)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        await asyncio.gather(*(one.follow(least=20) for one in streams))
        await stage.engines["b"].lose()
        await asyncio.gather(*(one.follow() for one in streams))
        for one in streams:
            assert (one.error, one.reason) == ("", "length")
            assert one.tokens == text_after(one.prompt, LONG)
        assert fleet._metrics.moved_requests["lost"]._value.get() > 0


async def test_a_stream_that_was_moved_can_be_resumed_at_another_gateway() -> None:
    async with fleet_of("a", "b", num_gateways=2) as stage:
        first, second = stage.gateways
        one = stream(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        await stage.engines[engine_of(first, one)].drain()
        await one.follow(least=len(one.tokens) + 5)
        found = Stream(one.submit)
        second.look_up(one.submit.request_id, found.queue)
        async with asyncio.timeout(DEADLINE_S):
            [attached] = await found.queue.take()
        assert isinstance(attached, Attached)
        tokens = list(attached.outputs[0])
        assert tokens == text_after(one.prompt, len(tokens))
        unknown = stream(7)
        second.look_up(unknown.submit.request_id, unknown.queue)
        await unknown.follow()
        assert unknown.error == "unknown"


async def test_an_engine_that_joins_takes_load() -> None:
    async with fleet_of("a") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(4)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        await stage.add_engine("b")
        await until(lambda: len(fleet._members.ready()) == 2)
        late = [stream(number) for number in range(4, 8)]
        for one in late:
            await fleet.submit([one.submit], one.queue)
        assert "b" in {engine_of(fleet, one) for one in late}
        await asyncio.gather(*(one.follow() for one in [*streams, *late]))
        assert all(one.reason == "length" for one in [*streams, *late])


async def test_the_only_engine_finishes_what_runs_before_it_stops() -> None:
    async with fleet_of("a") as stage:
        [fleet] = stage.gateways
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        await asyncio.gather(stage.engines["a"].drain(), one.follow())
        assert one.tokens == text_after(one.prompt, LONG)
        assert fleet._metrics.moved_requests["released"]._value.get() == 0


async def test_without_another_engine_a_lost_stream_ends_with_an_error() -> None:
    stage = Stage(memory_bus())
    await stage.add_engine("a")
    fleet = await stage.add_gateway(patience_s=0.5)
    try:
        await until(lambda: fleet._members.ready())
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        await stage.engines["a"].lose()
        await one.follow()
        assert "no other could go on with it" in one.error
        assert one.tokens == text_after(one.prompt, len(one.tokens))
    finally:
        for task in stage.tasks:
            task.cancel()
        await asyncio.gather(*stage.tasks, return_exceptions=True)


async def test_a_gateway_that_stops_ends_calls_whose_requests_are_at_no_engine() -> None:
    async with fleet_of() as stage:
        [fleet] = stage.gateways
        one = stream(0)
        fleet.attach(one.submit, one.queue)
        fleet.leave()
        async with asyncio.timeout(DEADLINE_S):
            assert ServerStopping() in await one.queue.take()


@pytest.mark.parametrize("ends", ["closed", "aborted"])
async def test_a_call_that_ends_while_its_request_is_moved_leaves_nothing(ends: str) -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        source = engine_of(fleet, one)
        draining = asyncio.ensure_future(stage.engines[source].drain())
        await until(lambda: one.submit.request_id in fleet._between or draining.done())
        if ends == "closed":
            fleet.close(one.submit.request_id, one.queue)
        else:
            fleet.abort(one.submit.request_id, one.queue, "gone")
        await draining
        assert fleet.num_open == 0
        assert not fleet._engine_of


def resumable(number: int) -> Stream:
    """A stream whose client can come back by its URL."""
    display = msgpack.packb({"resumable": True})
    return Stream(replace(stream(number).submit, display=display))


async def looked_up(fleet: Fleet, one: Stream) -> list[int]:
    """What a gateway that has only the id gets of a request."""
    found = Stream(one.submit)
    fleet.look_up(one.submit.request_id, found.queue)
    async with asyncio.timeout(DEADLINE_S):
        [attached] = await found.queue.take()
    assert isinstance(attached, Attached), attached
    assert attached.submit.prompt.tolist() == one.prompt
    fleet.attach(attached.submit, found.queue, ())
    await found.follow()
    assert (found.error, found.reason) == ("", "length")
    return found.tokens


@pytest.mark.parametrize("ends", ["released", "empty"])
async def test_a_stream_whose_gateway_and_engine_end_together_goes_on_elsewhere(ends: str) -> None:
    async with fleet_of("a", "b", num_gateways=2) as stage:
        first, second = stage.gateways
        one = resumable(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        source = engine_of(first, one)
        stage.tasks[0].cancel()
        await asyncio.gather(stage.tasks[0], return_exceptions=True)
        if ends == "released":
            await stage.engines[source].drain()
        else:  # it is lost, and back with a Redis that has nothing
            await stage.engines[source].lose()
            await until(lambda: second._members.by_id[source].engine is None)
            stage.engines[source].bus._logs.clear()
            stage.engines[source] = await stage.add_engine(source, stage.engines[source].bus)
            await until(lambda: second._members.by_id[source].engine is not None)
        assert await looked_up(second, one) == text_after(one.prompt, LONG)


async def test_a_stream_that_was_aborted_is_not_begun_again() -> None:
    async with fleet_of("a", "b", num_gateways=2, patience_s=0.5) as stage:
        first, second = stage.gateways
        one = resumable(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        source = engine_of(first, one)
        first.abort(one.submit.request_id, one.queue, "gone")
        await until(lambda: not first._tasks)
        await stage.engines[source].lose()
        await until(lambda: second._members.by_id[source].engine is None)
        found = Stream(one.submit)
        second.look_up(one.submit.request_id, found.queue)
        await found.follow()
        assert found.error
        assert not found.tokens
