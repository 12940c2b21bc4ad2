"""A connection to Redis that is asked directly.

redis-py's client looks for a connection in its pool, checks it, sets up retries and timeouts and
keeps statistics, for every command: several times the work of sending it and parsing the reply.
Here redis-py connects and logs in; a command then costs little more than its bytes. Its timeouts
are ours, too: ``asyncio.timeout`` never takes a cancellation for the end of its time.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio import Connection
from redis.exceptions import ResponseError

Command = Sequence[str | bytes | int]


class Line:
    """One connection, for one command or one batch of commands at a time.

    Args:
        connection: not connected yet; without a timeout of its own, see RedisBus.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ask(self, *commands: Command, patience_s: float) -> list[Any]:
        """Send commands at once.

        Args:
            patience_s: the longest that connecting, sending and all replies may take together.

        Returns:
            Their replies, errors among them.

        Raises:
            TimeoutError, RedisError, OSError: no reply; what was sent may have been carried out.
        """
        connection = self._connection
        try:
            async with asyncio.timeout(patience_s):
                # What can be read before anything was asked is the end of a connection.
                if connection.is_connected and await connection.can_read():
                    await connection.disconnect(nowait=True)
                data = b"".join([_packed(command) for command in commands])
                await connection.send_packed_command(data, check_health=False)
                return [await self._reply() for _ in commands]
        except BaseException as error:
            await connection.disconnect(nowait=True)  # a late reply would be taken for the next
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no reply within {patience_s:g} s") from None
            raise

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.disconnect()

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error


def _packed(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # too narrow
    return packed


class Lines:
    """As many as are in use at once; one that was given back is used again first.

    Args:
        connect: makes a line.
    """

    def __init__(self, connect: Callable[[], Line]) -> None:
        self._connect = connect
        self._idle: list[Line] = []

    async def ask(self, *commands: Command, patience_s: float) -> list[Any]:
        """Ask a line that is not in use; see Line."""
        line = self._idle.pop() if self._idle else self._connect()
        try:
            return await line.ask(*commands, patience_s=patience_s)
        finally:
            self._idle.append(line)

    async def close(self) -> None:
        """Disconnect the lines that are not in use."""
        while self._idle:
            await self._idle.pop().close()
