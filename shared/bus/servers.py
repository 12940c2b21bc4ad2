"""Where a bus's keys are: on one server, or on the nodes of a Redis Cluster."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shared.bus.connections import Command, ServerConnection, ServerConnections
from shared.bus.pools import close_pool, pool_of


class Servers(Protocol):
    """Methods raise TimeoutError, RedisError or OSError: no reply; see ServerConnection."""

    async def execute(self, *commands: Command, key: str, timeout_s: float) -> list[Any]:
        """Execute one command, or one transaction, at the server of a key.

        Args:
            key: in the commands; they have others only if ``are_together``.
        """

    async def execute_each(
        self, commands: Sequence[tuple[str, Command]], timeout_s: float
    ) -> list[Any]:
        """Execute commands that may be repeated, each at the server of the key beside it."""

    async def execute_beside(self, key: str, command: Command, timeout_s: float) -> Any:
        """Execute a command without keys at the server that has a key; the reply."""

    async def execute_on_all(self, command: Command, timeout_s: float) -> Mapping[str, Any]:
        """Execute a command without keys at each server that has keys; the replies, by place."""

    def are_together(self, keys: Sequence[str]) -> bool:
        """Whether one command, or one transaction, may have all these keys."""

    async def close(self) -> None:
        """Close idle connections."""


class OneServer(ServerConnections):
    """Implements Servers for one server, or for the primary that Sentinels name.

    Args:
        url: of the server.

    Raises:
        ValueError: the URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._pool = pool_of(url)
        try:
            self._new_connection()
        except TypeError as error:
            raise ValueError(f"an option is not known: {error}") from None
        super().__init__(self._new_connection)

    async def execute_each(
        self, commands: Sequence[tuple[str, Command]], timeout_s: float
    ) -> list[Any]:
        return await self.execute(*(command for _, command in commands), timeout_s=timeout_s)

    async def execute_beside(self, key: str, command: Command, timeout_s: float) -> Any:
        [reply] = await self.execute(command, key=key, timeout_s=timeout_s)
        return reply

    async def execute_on_all(self, command: Command, timeout_s: float) -> Mapping[str, Any]:
        [reply] = await self.execute(command, timeout_s=timeout_s)
        return {"": reply}

    def are_together(self, keys: Sequence[str]) -> bool:  # noqa: ARG002
        return True

    async def close(self) -> None:
        await super().close()
        await close_pool(self._pool)

    def _new_connection(self) -> ServerConnection:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return ServerConnection(connection)
