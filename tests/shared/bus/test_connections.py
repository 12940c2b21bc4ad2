"""Connections to a real server: replies are never mixed up, and broken connections are renewed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Connection, Redis
from redis.exceptions import RedisError, ResponseError

from shared.bus.connections import Command, ServerConnection, ServerConnections


class ConnectionWithTimeout(ServerConnection):
    """A connection with a default timeout."""

    def __init__(self, connection: Connection, timeout_s: float = 5.0) -> None:
        super().__init__(connection)
        self._default_s = timeout_s

    async def execute(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        return await super().execute(*commands, timeout_s=timeout_s or self._default_s)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def server(redis: Redis) -> AsyncIterator[ConnectionWithTimeout]:
    found = new_server_connection(redis)
    yield found
    await found.close()


def new_connection(redis: Redis) -> Connection:
    connection = redis.connection_pool.make_connection()
    connection.socket_timeout = None
    return connection


def new_server_connection(redis: Redis, timeout_s: float = 5.0) -> ConnectionWithTimeout:
    return ConnectionWithTimeout(new_connection(redis), timeout_s)


async def until_a_command_blocks(redis: Redis) -> None:
    """Return when the server holds a blocking command."""
    async with asyncio.timeout(5):
        while not (await redis.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0)


async def test_replies_come_in_the_order_of_the_commands_errors_among_them(
    server: ConnectionWithTimeout,
) -> None:
    blob = bytes(range(256))
    replies = await server.execute(
        ("SET", "key", blob), ("XADD", "key", "*", 0, b"x"), ("GET", "key")
    )
    assert replies[0] == b"OK"
    assert isinstance(replies[1], ResponseError)
    assert replies[2] == blob


async def test_a_cancelled_command_leaves_no_reply_to_the_next(
    server: ConnectionWithTimeout, redis: Redis
) -> None:
    await server.execute(("SET", "key", b"value"))
    waiting = asyncio.create_task(server.execute(("BLPOP", "list", 0)))
    await until_a_command_blocks(redis)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await redis.rpush("list", b"late")
    assert await server.execute(("GET", "key")) == [b"value"]


async def test_a_reply_that_takes_too_long_is_a_timeout(redis: Redis) -> None:
    server = new_server_connection(redis, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"no reply within 0\.05 s"):
        await server.execute(("BLPOP", "list", 0))
    assert await server.execute(("PING",)) == [b"PONG"]
    await server.close()


async def test_a_connection_that_the_server_closed_is_renewed_before_a_command_is_sent(
    redis: Redis,
) -> None:
    connection = new_connection(redis)
    server = ConnectionWithTimeout(connection)
    [first] = await server.execute(("CLIENT", "ID"))
    assert await redis.client_kill_filter(_id=first) == 1
    async with asyncio.timeout(5):
        while not await connection.can_read():  # the end of it has not arrived yet
            await asyncio.sleep(0)
    [second] = await server.execute(("CLIENT", "ID"))
    assert second != first
    await server.close()


async def test_a_connection_that_ends_before_the_reply_is_an_error(
    server: ConnectionWithTimeout, redis: Redis
) -> None:
    [own] = await server.execute(("CLIENT", "ID"))
    waiting = asyncio.create_task(server.execute(("BLPOP", "list", 0)))
    await until_a_command_blocks(redis)
    await redis.client_kill_filter(_id=own)
    with pytest.raises((RedisError, OSError)):
        await waiting
    assert await server.execute(("PING",)) == [b"PONG"]


async def test_an_idle_connection_is_used_again(redis: Redis) -> None:
    made: list[ServerConnection] = []

    def connect() -> ServerConnection:
        made.append(new_server_connection(redis))
        return made[-1]

    connections = ServerConnections(connect)
    await asyncio.gather(
        connections.execute(("PING",), timeout_s=5.0), connections.execute(("PING",), timeout_s=5.0)
    )
    assert len(made) == 2
    await connections.execute(("PING",), timeout_s=5.0)
    assert len(made) == 2
    await connections.close()
