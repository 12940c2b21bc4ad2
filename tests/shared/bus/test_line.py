"""Lines against a real server: replies are never mixed up, and what broke is mended."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Connection, Redis
from redis.exceptions import RedisError, ResponseError

from shared.bus.line import Command, Line, Lines


class PatientLine(Line):
    """One that waits so long for each reply."""

    def __init__(self, connection: Connection, patience_s: float = 5.0) -> None:
        super().__init__(connection)
        self._default_s = patience_s

    async def ask(self, *commands: Command, patience_s: float | None = None) -> list[Any]:
        return await super().ask(*commands, patience_s=patience_s or self._default_s)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def line(redis: Redis) -> AsyncIterator[PatientLine]:
    found = new_line(redis)
    yield found
    await found.close()


def new_connection(redis: Redis) -> Connection:
    connection = redis.connection_pool.make_connection()
    connection.socket_timeout = None
    return connection


def new_line(redis: Redis, patience_s: float = 5.0) -> PatientLine:
    return PatientLine(new_connection(redis), patience_s)


async def somebody_waits(redis: Redis) -> None:
    """Return when the server holds a blocking command."""
    async with asyncio.timeout(5):
        while not (await redis.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0)


async def test_replies_come_in_the_order_of_the_commands_errors_among_them(
    line: PatientLine,
) -> None:
    blob = bytes(range(256))
    replies = await line.ask(("SET", "key", blob), ("XADD", "key", "*", 0, b"x"), ("GET", "key"))
    assert replies[0] == b"OK"
    assert isinstance(replies[1], ResponseError)
    assert replies[2] == blob


async def test_who_stops_waiting_leaves_no_reply_to_the_next(
    line: PatientLine, redis: Redis
) -> None:
    await line.ask(("SET", "key", b"value"))
    waiting = asyncio.create_task(line.ask(("BLPOP", "list", 0)))
    await somebody_waits(redis)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await redis.rpush("list", b"for nobody")
    assert await line.ask(("GET", "key")) == [b"value"]


async def test_a_server_that_does_not_answer_in_time_is_given_up(redis: Redis) -> None:
    line = new_line(redis, patience_s=0.05)
    with pytest.raises(TimeoutError, match=r"no reply within 0\.05 s"):
        await line.ask(("BLPOP", "list", 0))
    assert await line.ask(("PING",)) == [b"PONG"]
    await line.close()


async def test_a_connection_that_was_closed_is_renewed_before_anything_is_sent(
    redis: Redis,
) -> None:
    connection = new_connection(redis)
    line = PatientLine(connection)
    [first] = await line.ask(("CLIENT", "ID"))
    assert await redis.client_kill_filter(_id=first) == 1
    async with asyncio.timeout(5):
        while not await connection.can_read():  # the end of it has not arrived yet
            await asyncio.sleep(0)
    [second] = await line.ask(("CLIENT", "ID"))
    assert second != first
    await line.close()


async def test_a_connection_that_ends_while_somebody_waits_is_an_error(
    line: PatientLine, redis: Redis
) -> None:
    [own] = await line.ask(("CLIENT", "ID"))
    waiting = asyncio.create_task(line.ask(("BLPOP", "list", 0)))
    await somebody_waits(redis)
    await redis.client_kill_filter(_id=own)
    with pytest.raises((RedisError, OSError)):
        await waiting
    assert await line.ask(("PING",)) == [b"PONG"]


async def test_a_line_that_nobody_uses_is_used_again(redis: Redis) -> None:
    made: list[Line] = []

    def connect() -> Line:
        made.append(new_line(redis))
        return made[-1]

    lines = Lines(connect)
    await asyncio.gather(lines.ask(("PING",), patience_s=5.0), lines.ask(("PING",), patience_s=5.0))
    assert len(made) == 2
    await lines.ask(("PING",), patience_s=5.0)
    assert len(made) == 2
    await lines.close()
