"""Connections to Redis that send commands and read replies with little overhead.

redis-py's client takes a connection from its pool, checks it, sets up retries and timeouts and
updates statistics for every command, which costs several times as much as sending the command and
parsing the reply. Here redis-py only connects and logs in. The timeout is ``asyncio.timeout``,
which never mistakes a cancellation for its own expiry.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio import Connection
from redis.exceptions import ResponseError

Command = Sequence[str | bytes | int]


class ServerConnection:
    """One connection, for one command or one batch of commands at a time.

    Args:
        connection: not connected yet; without a timeout of its own, see RedisBus.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(self, *commands: Command, timeout_s: float) -> list[Any]:
        """Send commands together and read their replies.

        Args:
            timeout_s: the longest that connecting, sending and all replies may take together.

        Returns:
            One reply for each command; errors of the server are returned, not raised.

        Raises:
            TimeoutError, RedisError, OSError: no reply; the commands may have been executed.
        """
        connection = self._connection
        try:
            async with asyncio.timeout(timeout_s):
                # Data before a command was sent can only be the end of the connection.
                if connection.is_connected and await connection.can_read():
                    await connection.disconnect(nowait=True)
                if not connection.is_connected:
                    await _connect(connection)
                data = b"".join([_packed(command) for command in commands])
                await connection.send_packed_command(data, check_health=False)
                return [await self._reply() for _ in commands]
        except BaseException as error:
            # A late reply would be read as the reply to the next command.
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no reply within {timeout_s:g} s") from None
            raise

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.disconnect()

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error


async def _connect(connection: Connection) -> None:
    """Connect; where Sentinels are asked, to the server that is the primary now."""
    await connection.connect()  # type: ignore[no-untyped-call]


def _packed(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # too narrow
    return packed


class ServerConnections:
    """As many connections as are in use at once; the one released last is used first.

    Args:
        connect: makes a connection.
    """

    def __init__(self, connect: Callable[[], ServerConnection]) -> None:
        self._connect = connect
        self._idle: list[ServerConnection] = []

    async def execute(
        self,
        *commands: Command,
        timeout_s: float,
        key: str = "",  # noqa: ARG002
    ) -> list[Any]:
        """Execute commands on an idle connection; see ServerConnection.

        Args:
            key: in the commands; one server has all keys.
        """
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            return await connection.execute(*commands, timeout_s=timeout_s)
        finally:
            self._idle.append(connection)

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().close()
