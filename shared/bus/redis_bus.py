"""The bus on Redis Streams. The only module that talks to Redis."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from shared.bus.api import START, Append, Entry, EntryId
from shared.bus.keys import ENGINES
from shared.errors import BusUnavailable, SettingsError, StaleWriter

_OLDEST_SERVER = (7, 0)  # the first with explicit epochs and automatic sequence: <epoch>-*
_REPLY_TIMEOUT_S = 5.0
# At once; each has a connection of its own, of which there are a hundred.
_MAX_APPENDS = 32
# Redis says so when an id is not above the log's last one.
_REFUSED = "equal or smaller"

_T = TypeVar("_T")


class RedisBus:
    """One Redis or Valkey server.

    A blocked read occupies its connection, so a process should have one reader.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user and password if the server
            asks for them. TLS options such as ``?ssl_ca_certs=FILE`` may follow.
        max_block_ms: the longest ``block_ms`` that ``read`` will be called with.

    Raises:
        SettingsError: the URL cannot be used; its password is not shown.
    """

    def __init__(self, url: str, max_block_ms: int = 5_000) -> None:
        # No retries: an append whose reply was lost must not be sent again. The socket's own
        # timeout must be longer than the longest blocking read, or every idle read would fail.
        try:
            self._redis: Redis = Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=max_block_ms / 1000 + _REPLY_TIMEOUT_S,
                socket_connect_timeout=_REPLY_TIMEOUT_S,
                health_check_interval=0,
                protocol=2,
            )
        except ValueError:
            wanted = "expected redis[s]://[user:password@]host:port/0"
            raise SettingsError("REDIS_URL", _without_login(url), wanted) from None
        self._appends = asyncio.Semaphore(_MAX_APPENDS)
        # Streams are read raw: redis-py's own parsing costs as much again as the reading.
        self._redis.response_callbacks.pop("XREAD", None)

    async def check_server(self) -> str:
        """Version of the server.

        Raises:
            BusUnavailable: it does not answer, or is too old for our entry ids.
        """
        info = cast(dict[str, Any], await self._ask(self._redis.info("server")))
        version = str(info.get("valkey_version", info["redis_version"]))
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            needed = ".".join(map(str, _OLDEST_SERVER))
            raise BusUnavailable(f"Redis {version} is too old: {needed} or newer is needed")
        return version

    async def append(self, append: Append) -> EntryId:
        command = _xadd(append)
        try:
            async with self._appends:
                return EntryId.parse(await self._ask(self._execute(*command)))
        except ResponseError as error:
            raise _append_error(append, error) from None

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        pipeline: Pipeline = self._redis.pipeline(transaction=True)
        for append in appends:
            pipeline.execute_command(*_xadd(append))
        async with self._appends:
            replies = await self._ask(pipeline.execute(raise_on_error=False))
        for append, reply in zip(appends, replies, strict=True):
            if isinstance(reply, ResponseError):
                raise _append_error(append, reply)
            if isinstance(reply, Exception):
                raise BusUnavailable(str(reply))
        return [EntryId.parse(reply) for reply in replies]

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        command: list[Any] = ["XREAD", "COUNT", max_entries]
        if block_ms > 0:
            command += ["BLOCK", block_ms]
        command += ["STREAMS", *cursors, *(str(cursor) for cursor in cursors.values())]
        reply = await self._ask(self._execute(*command))
        return {_text(name): [_entry(raw) for raw in entries] for name, entries in reply or ()}

    async def last_id(self, log: str) -> EntryId:
        if not await self._ask(self._redis.exists(log)):
            return START
        info = await self._ask(self._redis.xinfo_stream(log))
        return EntryId.parse(info["last-generated-id"])

    async def length(self, log: str) -> int:
        return int(await self._ask(self._redis.xlen(log)))

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        await self._ask(self._redis.set(key, value, px=ttl_ms))

    async def get(self, key: str) -> bytes | None:
        return cast(bytes | None, await self._ask(self._redis.get(key)))

    async def add_engine(self, engine_id: str) -> None:
        await self._ask(self._redis.sadd(ENGINES, engine_id))

    async def engines(self) -> list[str]:
        members = await self._ask(cast(Awaitable[set[bytes]], self._redis.smembers(ENGINES)))
        return sorted(_text(member) for member in members)

    async def now_ms(self) -> int:
        seconds, micros = await self._ask(self._redis.time())
        return int(seconds) * 1000 + int(micros) // 1000

    async def run_id(self) -> str:
        info = cast(dict[str, Any], await self._ask(self._redis.info("server")))
        return str(info["run_id"])

    async def close(self) -> None:
        await self._redis.aclose()

    def _execute(self, *command: Any) -> Awaitable[Any]:
        return cast(Awaitable[Any], self._redis.execute_command(*command))  # type: ignore[no-untyped-call]

    async def _ask(self, reply: Awaitable[_T]) -> _T:
        try:
            return await reply
        except ResponseError as error:
            # Out of memory, read only, still loading: the server is there, but of no use now.
            if _REFUSED in str(error):
                raise
            raise BusUnavailable(f"Redis refused: {error}") from error
        except (RedisError, OSError) as error:
            raise BusUnavailable(f"Redis does not answer: {error}") from error


def _xadd(append: Append) -> list[Any]:
    if not append.messages:
        raise ValueError("an entry needs at least one message")
    command: list[Any] = ["XADD", append.log]
    if append.trim_below is not None:
        command += ["MINID", "=", str(append.trim_below)]
    if append.epoch is None:
        command.append("*")
    else:
        command.append(f"{append.epoch}-{'*' if append.seq is None else append.seq}")
    for index, message in enumerate(append.messages):
        command += [index, message]
    return command


def _append_error(append: Append, error: ResponseError) -> Exception:
    if _REFUSED in str(error):
        return StaleWriter(f"{append.log}: id of epoch {append.epoch} refused: {error}")
    return BusUnavailable(f"Redis refused: {error}")


def _entry(raw: Any) -> Entry:
    entry_id, fields = raw
    return Entry(EntryId.parse(entry_id), tuple(fields[1::2]))


def _without_login(url: str) -> str:
    """A URL as it may be shown."""
    scheme, _, rest = url.rpartition("://")
    place = rest.rpartition("@")[2] if "@" in rest else "..."
    return f"{scheme}://{place}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
