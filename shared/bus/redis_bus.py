"""The bus on Redis Streams."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError, ResponseError

from shared.bus.api import START, Append, Entry, EntryId
from shared.bus.connections import Command, ServerConnection, ServerConnections
from shared.bus.keys import ENGINES
from shared.bus.pools import close_pool, pool_of
from shared.bus.server_settings import settings_warnings
from shared.errors import BusUnavailable, LoginRefused, SettingsError, StaleWriter

_OLDEST_SERVER = (7, 0)  # the first with explicit epochs and automatic sequence: <epoch>-*
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
    """One Redis or Valkey server, or the primary of several.

    A blocked read occupies its connection, so a process should have one reader.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user and password if the server
            asks for them. TLS options such as ``?ssl_ca_certs=FILE`` may follow.
            ``redis+sentinel://host:port,host:port/service`` is the primary that Sentinels name.
        max_block_ms: the longest ``block_ms`` that ``read`` will be called with.

    Raises:
        SettingsError: the URL cannot be used; its password is not shown.
    """

    def __init__(self, url: str, max_block_ms: int = 5_000) -> None:
        try:
            self._pool = pool_of(url)
        except ValueError:
            wanted = (
                "expected redis[s]://[user:password@]host:port/0 or "
                "redis[s]+sentinel://[user:password@]host:port,host:port/service "
                "(a Redis Cluster cannot be used)"
            )
            raise SettingsError("REDIS_URL", _without_login(url), wanted) from None
        parts = urlsplit(url)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="")
        self._place = place.geturl()  # without user and password
        self._connections = ServerConnections(self._connect)
        self._timeout_s = max_block_ms / 1000 + _REPLY_TIMEOUT_S  # a read may be a blocking one
        self._appends = asyncio.Semaphore(_MAX_APPENDS)

    async def check_server(self) -> str:
        """Check that the server can be used; its version.

        Raises:
            BusUnavailable: it does not answer, or is too old for these entry ids.
            SettingsError: it has only a part of the keys, as a node of a Redis Cluster.
        """
        info = await self._info()
        modes = info.get("redis_mode"), info.get("server_mode")  # the latter is Valkey's
        if "cluster" in modes and (size := await self._cluster_size()) > 1:
            reason = (
                f"a Redis Cluster of {size} primaries, which cannot be used: its nodes have a part "
                "of the keys each; expected one server, or redis+sentinel:// for a primary with "
                "replicas; a fleet's engines may have a server each (--directory-url)"
            )
            raise SettingsError("REDIS_URL", self._place, reason)
        version = info.get("valkey_version", info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            needed = ".".join(map(str, _OLDEST_SERVER))
            raise BusUnavailable(f"Redis {version} is too old: {needed} or newer is needed")
        return version

    async def settings_warnings(self) -> Sequence[str]:
        """Warnings on settings of the server with which requests may be lost.

        Raises:
            BusUnavailable: it does not answer.
        """
        return settings_warnings(await self._info("default"))

    async def append(self, append: Append) -> EntryId:
        return (await self.append_all([append]))[0]

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        commands = _transaction([_xadd(append) for append in appends])
        await self._begin_append()
        try:
            replies = await self._execute_all(*commands, timeout_s=self._timeout_s)
            if any(isinstance(reply, OutOfMemoryError) for reply in replies):
                # Redis refuses before it executes anything, also of a transaction.
                if not await self._trim_for(appends):
                    raise _refused(next(r for r in replies if isinstance(r, OutOfMemoryError)))
                replies = await self._execute_all(*commands, timeout_s=self._timeout_s)
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
        [reply] = await self._execute_all(command, timeout_s=self._timeout_s)
        if isinstance(reply, ResponseError):
            raise _refused(reply)
        return {_text(name): [_entry(raw) for raw in entries] for name, entries in reply or ()}

    async def trim(self, log: str, below: EntryId) -> int:
        return int(await self._execute("XTRIM", log, "MINID", "=", str(below)))

    async def memory_share(self) -> float:
        found = await self._info("memory")
        limit = int(found.get("maxmemory", 0))
        # Buffers on their way to the disk do not count against the limit.
        used = int(found["used_memory"]) - int(found.get("mem_not_counted_for_evict", 0))
        return used / limit if limit else 0.0

    async def last_id(self, log: str) -> EntryId:
        [reply] = await self._execute_all(("XINFO", "STREAM", log))
        if isinstance(reply, ResponseError):
            if _NO_KEY in str(reply):
                return START
            raise _refused(reply)
        found = dict(zip(reply[::2], reply[1::2], strict=True))
        return EntryId.parse(found[b"last-generated-id"])

    async def length(self, log: str) -> int:
        return int(await self._execute("XLEN", log))

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        [reply] = await self._execute_all(("SET", key, value, "PX", ttl_ms))
        if isinstance(reply, OutOfMemoryError) and await self._execute("PEXPIRE", key, ttl_ms):
            return  # the key keeps its old value, so that a lease does not expire
        if isinstance(reply, ResponseError):
            raise _refused(reply)

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._execute("GET", key)
        return found

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = await self._execute("MGET", *keys)
        return found

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl_ms: int) -> bool:
        if old is None:
            return await self._execute("SET", key, new, "PX", ttl_ms, "NX") is not None
        return bool(await self._execute("EVAL", _SWAP, 1, key, old, new, ttl_ms))

    async def expire(self, key: str, ttl_ms: int) -> bool:
        return bool(await self._execute("PEXPIRE", key, ttl_ms))

    async def delete(self, *keys: str) -> int:
        return int(await self._execute("UNLINK", *keys))

    async def tally(self, key: str, bucket: int, amount: int, oldest: int, ttl_ms: int) -> int:
        commands: list[Command] = [
            ("HINCRBY", key, bucket, amount),
            ("PEXPIRE", key, ttl_ms),
            ("HGETALL", key),
        ]
        replies = _executed(await self._execute_all(*_transaction(commands)))
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise _refused(reply)
        found = replies[-1]
        buckets = dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
        old = [number for number in buckets if number < oldest]
        if old:
            await self._execute("HDEL", key, *old)
        return sum(amount for number, amount in buckets.items() if number >= oldest)

    async def add_engine(self, engine_id: str) -> None:
        [reply] = await self._execute_all(("SADD", ENGINES, engine_id))
        if isinstance(reply, ResponseError) and engine_id not in await self.engines():
            raise _refused(reply)

    async def engines(self) -> list[str]:
        return sorted(map(_text, await self._execute("SMEMBERS", ENGINES)))

    async def now_ms(self) -> int:
        seconds, micros = await self._execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def run_id(self) -> str:
        return (await self._info())["run_id"]

    async def close(self) -> None:
        await self._connections.close()
        await close_pool(self._pool)

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

    def _connect(self) -> ServerConnection:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return ServerConnection(connection)

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

    async def _info(self, section: str = "server") -> dict[str, str]:
        """Fields of the server's INFO, by name."""
        return _fields(await self._execute("INFO", section))

    async def _cluster_size(self) -> int:
        """Primaries of the Redis Cluster to which the server belongs."""
        fields = _fields(await self._execute("CLUSTER", "INFO"))
        return int(fields.get("cluster_size", 0))

    async def _execute(self, *command: str | bytes | int) -> Any:
        """The reply to one command that does not block.

        Raises:
            BusUnavailable: there is no reply, or it is an error.
        """
        [reply] = await self._execute_all(command)
        if isinstance(reply, ResponseError):
            raise _refused(reply)
        return reply

    async def _execute_all(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        """The replies to commands; errors of the server are returned, not raised.

        Args:
            timeout_s: the longest that they may take together.

        Raises:
            BusUnavailable: there are no replies.
        """
        try:
            return await self._connections.execute(
                *commands, timeout_s=timeout_s or _REPLY_TIMEOUT_S
            )
        except AuthenticationError as error:
            raise LoginRefused(f"Redis refused user or password: {error}") from error
        except ResponseError as error:  # to the login
            raise _refused(error) from error
        except (RedisError, OSError) as error:
            raise BusUnavailable(f"Redis does not answer: {error}") from error


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
            raise _refused(reply)  # the first error has the reason, EXEC's does not
    executed: list[Any] = replies[-1]
    return executed


def _refused(error: Exception) -> BusUnavailable:
    """The error for a reply such as out of memory, read only, or still loading."""
    return BusUnavailable(f"Redis refused: {error}")


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
    return _refused(error)


def _entry(raw: Any) -> Entry:
    entry_id, fields = raw
    return Entry(EntryId.parse(entry_id), tuple(fields[1::2]))


def _without_login(url: str) -> str:
    """A URL without user and password, for messages."""
    scheme, _, rest = url.rpartition("://")
    place = rest.rpartition("@")[2] if "@" in rest else "..."
    return f"{scheme}://{place}"


def _fields(reply: bytes | str) -> dict[str, str]:
    """Fields of a reply with a line for each, by name."""
    pairs = (line.partition(":") for line in _text(reply).splitlines() if ":" in line)
    return {key: value for key, _, value in pairs}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
