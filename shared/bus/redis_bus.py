"""The bus on Redis Streams."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from shared.bus.api import START, Append, Entry, EntryId
from shared.bus.connections import Command
from shared.bus.keys import ENGINES, EngineKeys
from shared.bus.replies import bus_error, entry_of, fields_of, refused, text_of
from shared.bus.server_check import ServerCheck, servers_at
from shared.errors import BusUnavailable, StaleWriter

_REPLY_TIMEOUT_S = 5.0
_MAX_APPENDS = 32  # at once; each has a connection of its own
# Part of Redis's error for an id that is not above the log's last one.
_REFUSED = "equal or smaller"
_NO_KEY = "no such key"

_SWAP = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then "
    "redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) return 1 end return 0"
)


class RedisBus:
    """One Redis or Valkey server, the primary of several, or a Redis Cluster.

    A blocked read occupies its connection, so a process should have one reader.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user and password if the server
            asks for them. TLS options such as ``?ssl_ca_certs=FILE`` may follow.
            ``redis+sentinel://host:port,host:port/service`` is the primary that Sentinels name,
            ``redis+cluster://host:port,host:port`` the cluster of these nodes.
        max_block_ms: the longest ``block_ms`` that ``read`` will be called with.
        home: a key. Of a cluster, clock, run id and memory are those of the node that has it.
        setting: that has the URL, for errors.

    Raises:
        SettingsError: the URL cannot be used; its password is not shown.
    """

    def __init__(
        self,
        url: str,
        max_block_ms: int = 5_000,
        home: str = ENGINES,
        setting: str = "REDIS_URL",
    ) -> None:
        self._servers = servers_at(url, setting)
        self._check = ServerCheck(self._servers, url, setting)
        self._home = home
        self._timeout_s = max_block_ms / 1000 + _REPLY_TIMEOUT_S  # a read may be a blocking one
        self._appends = asyncio.Semaphore(_MAX_APPENDS)

    @classmethod
    def of_engine(cls, url: str, engine_id: str) -> "RedisBus":
        """The bus with the logs of an engine; see above."""
        return cls(url, home=EngineKeys(engine_id).info)

    @classmethod
    def of_directory(cls, url: str, home: str = ENGINES) -> "RedisBus":
        """The bus with the directory of a fleet."""
        return cls(url, home=home, setting="PAGESTREAM_DIRECTORY_URL")

    async def check_server(self) -> str:
        """Check that the server, or each primary of a cluster, can be used; the oldest version.

        Raises:
            BusUnavailable: it does not answer, or is too old for these entry ids.
            SettingsError: the URL is that of one server, and this is one of several with a part of
                the keys each; or that of a cluster, and this is none.
        """
        return await self._check.version()

    async def settings_warnings(self) -> Sequence[str]:
        """Warnings on settings of servers with which requests may be lost.

        Raises:
            BusUnavailable: one of them does not answer.
        """
        return await self._check.warnings()

    async def append(self, append: Append) -> EntryId:
        return (await self.append_all([append]))[0]

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        commands = _transaction([_xadd(append) for append in appends])
        await self._begin_append()
        try:
            log = appends[0].log
            replies = await self._execute_all(log, *commands, timeout_s=self._timeout_s)
            if any(isinstance(reply, OutOfMemoryError) for reply in replies):
                # Redis refuses before it executes anything, also of a transaction.
                if not await self._trim_for(appends):
                    raise refused(next(r for r in replies if isinstance(r, OutOfMemoryError)))
                replies = await self._execute_all(log, *commands, timeout_s=self._timeout_s)
        finally:
            self._appends.release()
        if len(appends) != 1:
            replies = _executed(replies)
        for append, reply in zip(appends, replies, strict=True):
            if isinstance(reply, Exception):
                raise _append_error(append, reply)
        return [EntryId.parse(reply) for reply in replies]

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        command: list[str | bytes | int] = ["XREAD", "COUNT", max_entries]
        if block_ms > 0:
            command += ["BLOCK", block_ms]
        command += ["STREAMS", *cursors, *(str(cursor) for cursor in cursors.values())]
        log = next(iter(cursors))
        [reply] = await self._execute_all(log, command, timeout_s=self._timeout_s)
        if isinstance(reply, ResponseError):
            raise refused(reply)
        return {text_of(name): [entry_of(raw) for raw in entries] for name, entries in reply or ()}

    async def trim(self, log: str, below: EntryId) -> int:
        return int(await self._execute(log, "XTRIM", log, "MINID", "=", str(below)))

    async def memory_share(self) -> float:
        found = fields_of(await self._execute_beside_home("INFO", "memory"))
        limit = int(found.get("maxmemory", 0))
        # Buffers on their way to the disk do not count against the limit.
        used = int(found["used_memory"]) - int(found.get("mem_not_counted_for_evict", 0))
        return used / limit if limit else 0.0

    async def last_id(self, log: str) -> EntryId:
        [reply] = await self._execute_all(log, ("XINFO", "STREAM", log))
        if isinstance(reply, ResponseError):
            if _NO_KEY in str(reply):
                return START
            raise refused(reply)
        found = dict(zip(reply[::2], reply[1::2], strict=True))
        return EntryId.parse(found[b"last-generated-id"])

    async def length(self, log: str) -> int:
        return int(await self._execute(log, "XLEN", log))

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        [reply] = await self._execute_all(key, ("SET", key, value, "PX", ttl_ms))
        if isinstance(reply, OutOfMemoryError) and await self.expire(key, ttl_ms):
            return  # the key keeps its old value, so that a lease does not expire
        if isinstance(reply, ResponseError):
            raise refused(reply)

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._execute(key, "GET", key)
        return found

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None]
        if self._servers.are_together(keys):
            found = await self._execute(keys[0], "MGET", *keys)
        else:
            found = await self._execute_each("GET", keys)
        return found

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl_ms: int) -> bool:
        if old is None:
            return await self._execute(key, "SET", key, new, "PX", ttl_ms, "NX") is not None
        return bool(await self._execute(key, "EVAL", _SWAP, 1, key, old, new, ttl_ms))

    async def expire(self, key: str, ttl_ms: int) -> bool:
        return bool(await self._execute(key, "PEXPIRE", key, ttl_ms))

    async def delete(self, *keys: str) -> int:
        if self._servers.are_together(keys):
            return int(await self._execute(keys[0], "UNLINK", *keys))
        return sum(await self._execute_each("UNLINK", keys))

    async def tally(self, key: str, bucket: int, amount: int, oldest: int, ttl_ms: int) -> int:
        commands: list[Command] = [
            ("HINCRBY", key, bucket, amount),
            ("PEXPIRE", key, ttl_ms),
            ("HGETALL", key),
        ]
        replies = _executed(await self._execute_all(key, *_transaction(commands)))
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise refused(reply)
        found = replies[-1]
        buckets = dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
        old = [number for number in buckets if number < oldest]
        if old:
            await self._execute(key, "HDEL", key, *old)
        return sum(amount for number, amount in buckets.items() if number >= oldest)

    async def add_engine(self, engine_id: str) -> None:
        [reply] = await self._execute_all(ENGINES, ("SADD", ENGINES, engine_id))
        if isinstance(reply, ResponseError) and engine_id not in await self.engines():
            raise refused(reply)

    async def engines(self) -> list[str]:
        return sorted(map(text_of, await self._execute(ENGINES, "SMEMBERS", ENGINES)))

    async def now_ms(self) -> int:
        seconds, micros = await self._execute_beside_home("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def run_id(self) -> str:
        return fields_of(await self._execute_beside_home("INFO", "server"))["run_id"]

    async def close(self) -> None:
        await self._servers.close()

    async def _begin_append(self) -> None:
        """Wait until fewer than the most allowed appends are in progress.

        Raises:
            BusUnavailable: none of them got a reply in time; nothing was sent.
        """
        if not self._appends.locked():
            # The common case, several times in a step: no timer is started.
            await self._appends.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._appends.acquire()
        except TimeoutError:
            why = f"{_MAX_APPENDS} appends had no reply within {self._timeout_s:g} s"
            raise BusUnavailable(f"Redis does not answer: {why}") from None

    async def _trim_for(self, appends: Sequence[Append]) -> bool:
        """Trim the logs of refused appends as these would have; whether any entry was dropped.

        A log in which a later epoch has begun is not trimmed: its writer may need the entries.
        """
        num_dropped = 0
        for append in appends:
            below, epoch = append.trim_below, append.epoch
            if below is not None and (
                epoch is None or (await self.last_id(append.log)).epoch <= epoch
            ):
                num_dropped += await self.trim(append.log, below)
        return num_dropped > 0

    async def _execute(self, key: str, *command: str | bytes | int) -> Any:
        """The reply to one command that does not block, of the server that has a key.

        Raises:
            BusUnavailable: there is no reply, or it is an error.
        """
        [reply] = await self._execute_all(key, command)
        if isinstance(reply, ResponseError):
            raise refused(reply)
        return reply

    async def _execute_beside_home(self, *command: str) -> Any:
        """The reply to a command without keys.

        Raises:
            BusUnavailable: there is no reply, or it is an error.
        """
        try:
            reply = await self._servers.execute_beside(self._home, command, _REPLY_TIMEOUT_S)
        except (RedisError, OSError) as error:
            raise bus_error(error) from error
        if isinstance(reply, ResponseError):
            raise refused(reply)
        return reply

    async def _execute_each(self, name: str, keys: Sequence[str]) -> list[Any]:
        """The replies to one command for each key, which may be repeated.

        Raises:
            BusUnavailable: a reply is missing, or is an error.
        """
        commands: list[tuple[str, Command]] = [(key, (name, key)) for key in keys]
        try:
            replies = await self._servers.execute_each(commands, _REPLY_TIMEOUT_S)
        except (RedisError, OSError) as error:
            raise bus_error(error) from error
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise refused(reply)
        return replies

    async def _execute_all(
        self, key: str, *commands: Command, timeout_s: float | None = None
    ) -> list[Any]:
        """The replies to one command or one transaction; errors are returned, not raised.

        Args:
            key: in the commands.
            timeout_s: the longest that they may take together.

        Raises:
            BusUnavailable: there are no replies.
        """
        try:
            return await self._servers.execute(
                *commands, key=key, timeout_s=timeout_s or _REPLY_TIMEOUT_S
            )
        except (RedisError, OSError) as error:
            raise bus_error(error) from error


def _transaction(commands: list[Command]) -> list[Command]:
    """The commands as one transaction: other clients see the effects of all of them, or of none."""
    return commands if len(commands) == 1 else [("MULTI",), *commands, ("EXEC",)]


def _executed(replies: list[Any]) -> list[Any]:
    """The replies to the commands of a transaction.

    Raises:
        BusUnavailable: none of them was executed.
    """
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise refused(reply)  # the first error has the reason, EXEC's does not
    executed: list[Any] = replies[-1]
    return executed


def _xadd(append: Append) -> Command:
    if not append.messages:
        raise ValueError("an entry needs at least one message")
    command: list[str | bytes | int] = ["XADD", append.log]
    if append.trim_below is not None:
        command += ["MINID", "=", str(append.trim_below)]
    if append.epoch is None:
        command.append("*")
    else:
        command.append(f"{append.epoch}-{'*' if append.seq is None else append.seq}")
    for index, message in enumerate(append.messages):
        command += [index, message]
    return command


def _append_error(append: Append, error: Exception) -> Exception:
    if _REFUSED in str(error):
        return StaleWriter(f"{append.log}: id of epoch {append.epoch} refused: {error}")
    return refused(error)
