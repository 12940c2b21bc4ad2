"""A party's way to the server, on which faults are injected."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shared.bus.api import Append, Entry, EntryId
from shared.errors import BusUnavailable, StaleWriter
from tests.simulation.deployment.loop import Party, VirtualLoop
from tests.simulation.deployment.server import Server


class Network(Protocol):
    """What lies between a party and the server."""

    def there_s(self) -> float:
        """How long a command travels.

        Raises:
            BusUnavailable: there is no way any more.
        """

    def back_s(self) -> float:
        """How long a reply travels."""

    def inject(self, when: str, what: str) -> bool:
        """Whether the reply will arrive; the party may be frozen now."""

    def repeats(self, log: str) -> bool:
        """The command arrives twice."""

    def wrote(self, what: str, is_refused: bool) -> None:
        """A command was carried out that appends to logs."""


class Connection:
    """The bus of one party."""

    def __init__(self, server: Server, network: Network, party: Party, loop: VirtualLoop) -> None:
        self._server = server
        self._network = network
        self._party = party
        self._loop = loop

    async def _command(self, what: str, command: Callable[[], Any]) -> Any:
        network = self._network
        await self._loop.sleep(network.there_s())
        network.inject("before", what)
        if not self._party.is_running:
            await self._loop.sleep(0.0)
        connection = self._check(self._server.connection)
        refused: StaleWriter | None = None
        result = None
        try:
            result = command()
        except StaleWriter as error:
            refused = error
        arrives = network.inject("after", what)
        if (back_s := network.back_s()) or not self._party.is_running:
            await self._loop.sleep(back_s)
        self._check(connection)
        if not arrives:
            raise BusUnavailable(f"the reply to {what} is lost")
        if refused is not None:
            raise refused
        return result

    def _check(self, connection: tuple[int, int]) -> tuple[int, int]:
        if self._server.is_away or self._server.connection != connection:
            raise BusUnavailable("the connection is broken")
        return connection

    async def append(self, append: Append) -> EntryId:
        return (await self.append_all([append]))[0]

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        what = "append " + ", ".join(append.log.partition(":")[2] for append in appends)
        return await self._command(what, lambda: self._append(what, appends))

    def _append(self, what: str, appends: Sequence[Append]) -> list[EntryId]:
        try:
            ids = self._server.append_all(appends)
        except StaleWriter:
            self._network.wrote(what, is_refused=True)
            raise
        self._network.wrote(what, is_refused=False)
        if len(appends) == 1 and self._network.repeats(appends[0].log):
            self._server.append_all(appends)
        return ids

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        server, network = self._server, self._network
        await self._loop.sleep(network.there_s())
        network.inject("before", "read")
        if not self._party.is_running:
            await self._loop.sleep(0.0)
        connection = server.connection
        deadline_s = self._loop.time() + block_ms / 1000
        while True:
            self._check(connection)
            found = server.read(cursors, max_entries)
            if found or self._loop.time() >= deadline_s:
                break
            await server.changed(cursors, deadline_s)
        arrives = network.inject("after", "read")
        if (back_s := network.back_s()) or not self._party.is_running:
            await self._loop.sleep(back_s)
        self._check(connection)
        if not arrives:
            raise BusUnavailable("the reply to read is lost")
        return found

    async def trim(self, log: str, below: EntryId) -> int:
        return await self._command("trim", lambda: self._server.ask(lambda b: b.trim(log, below)))

    async def memory_share(self) -> float:
        return await self._command("memory_share", lambda: self._server.memory_share)

    async def last_id(self, log: str) -> EntryId:
        return await self._command("last_id", lambda: self._server.ask(lambda b: b.last_id(log)))

    async def length(self, log: str) -> int:
        return await self._command("length", lambda: self._server.ask(lambda b: b.length(log)))

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        await self._command("put", lambda: self._server.put(key, value, ttl_ms))

    async def get(self, key: str) -> bytes | None:
        return await self._command("get", lambda: self._server.ask(lambda b: b.get(key)))

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._command("get", lambda: self._server.ask(lambda b: b.get_all(keys)))

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl_ms: int) -> bool:
        ask = self._server.ask
        return await self._command("swap", lambda: ask(lambda b: b.swap(key, old, new, ttl_ms)))

    async def expire(self, key: str, ttl_ms: int) -> bool:
        ask = self._server.ask
        return await self._command("expire", lambda: ask(lambda b: b.expire(key, ttl_ms)))

    async def delete(self, *keys: str) -> int:
        ask = self._server.ask
        return await self._command("delete", lambda: ask(lambda b: b.delete(*keys)))

    async def tally(self, key: str, bucket: int, amount: int, oldest: int, ttl_ms: int) -> int:
        ask = self._server.ask
        return await self._command(
            "tally", lambda: ask(lambda b: b.tally(key, bucket, amount, oldest, ttl_ms))
        )

    async def add_engine(self, engine_id: str) -> None:
        await self._command("add_engine", lambda: self._server.add_engine(engine_id))

    async def engines(self) -> list[str]:
        return await self._command("engines", lambda: self._server.ask(lambda b: b.engines()))

    async def now_ms(self) -> int:
        return await self._command("now_ms", self._server.clock_ms)

    async def run_id(self) -> str:
        return await self._command("run_id", lambda: f"run-{self._server.incarnation}")

    async def close(self) -> None:
        pass
