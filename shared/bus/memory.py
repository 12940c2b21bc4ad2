"""The bus in the memory of one process, for tests and simulation, with the rules of Redis."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.bus.api import START, Append, Entry, EntryId
from shared.errors import StaleWriter


@dataclass(slots=True)
class _Log:
    entries: list[Entry] = field(default_factory=list)
    last: EntryId = START
    expires_ms: int | None = None


class MemoryBus:
    """All logs and keys in dictionaries.

    Args:
        clock_ms: the bus's clock; the caller may drive it by hand.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._logs: dict[str, _Log] = {}
        self._values: dict[str, tuple[bytes, int]] = {}
        self._tallies: dict[str, dict[int, int]] = {}
        self._engines: set[str] = set()
        self._appended = asyncio.Event()

    async def append(self, append: Append) -> EntryId:
        if not append.messages:
            raise ValueError("an entry needs at least one message")
        self._drop_expired(append.log)
        log = self._logs.setdefault(append.log, _Log())
        entry_id = self._next_id(log, append)
        if entry_id <= log.last:
            raise StaleWriter(f"{append.log}: {entry_id} is not above {log.last}")
        log.entries.append(Entry(entry_id, tuple(append.messages)))
        log.last = entry_id
        if append.trim_below is not None:
            keep = append.trim_below
            log.entries = [entry for entry in log.entries if entry.id >= keep]
        self._appended.set()
        self._appended = asyncio.Event()
        return entry_id

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        ids: list[EntryId] = []
        refused: StaleWriter | None = None
        for append in appends:
            try:
                ids.append(await self.append(append))
            except StaleWriter as error:
                refused = error
        if refused is not None:
            raise refused
        return ids

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        found = self._collect(cursors, max_entries)
        if found or block_ms <= 0:
            return found
        deadline = asyncio.get_running_loop().time() + block_ms / 1000
        while not found:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            try:
                # wait_for of Python 3.11 can lose a cancellation.
                async with asyncio.timeout(remaining):
                    await self._appended.wait()
            except TimeoutError:
                break
            found = self._collect(cursors, max_entries)
        return found

    async def trim(self, log: str, below: EntryId) -> int:
        found = self._logs.get(log)
        if found is None:
            return 0
        before = len(found.entries)
        found.entries = [entry for entry in found.entries if entry.id >= below]
        return before - len(found.entries)

    async def memory_share(self) -> float:
        return 0.0

    async def last_id(self, log: str) -> EntryId:
        self._drop_expired(log)
        return self._logs[log].last if log in self._logs else START

    async def length(self, log: str) -> int:
        self._drop_expired(log)
        return len(self._logs[log].entries) if log in self._logs else 0

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        self._values[key] = (value, self._clock_ms() + ttl_ms)

    async def get(self, key: str) -> bytes | None:
        value, expires_ms = self._values.get(key, (None, 0))
        return value if expires_ms > self._clock_ms() else None

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        return [await self.get(key) for key in keys]

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl_ms: int) -> bool:
        if await self.get(key) != old:
            return False
        await self.put(key, new, ttl_ms)
        return True

    async def expire(self, key: str, ttl_ms: int) -> bool:
        self._drop_expired(key)
        expires_ms = self._clock_ms() + ttl_ms
        if key in self._logs:
            self._logs[key].expires_ms = expires_ms
        elif await self.get(key) is not None:
            self._values[key] = (self._values[key][0], expires_ms)
        else:
            return False
        return True

    async def delete(self, *keys: str) -> int:
        num_found = 0
        for key in keys:
            self._drop_expired(key)
            found = await self.get(key) is not None or key in self._logs
            num_found += found
            self._logs.pop(key, None)
            self._values.pop(key, None)
        return num_found

    async def tally(self, key: str, bucket: int, amount: int, oldest: int, ttl_ms: int) -> int:  # noqa: ARG002
        buckets = self._tallies.setdefault(key, {})
        buckets[bucket] = buckets.get(bucket, 0) + amount
        for old in [number for number in buckets if number < oldest]:
            del buckets[old]
        return sum(buckets.values())

    async def add_engine(self, engine_id: str) -> None:
        self._engines.add(engine_id)

    async def engines(self) -> list[str]:
        return sorted(self._engines)

    async def now_ms(self) -> int:
        return self._clock_ms()

    async def run_id(self) -> str:
        return f"memory-{id(self)}"

    async def close(self) -> None:
        pass

    def _drop_expired(self, log: str) -> None:
        found = self._logs.get(log)
        if found is None or found.expires_ms is None:
            return
        if found.expires_ms <= self._clock_ms():
            del self._logs[log]

    def _next_id(self, log: _Log, append: Append) -> EntryId:
        if append.epoch is None:
            now = max(self._clock_ms(), log.last.epoch)
            return EntryId(now, log.last.seq + 1 if now == log.last.epoch else 0)
        if append.seq is not None:
            return EntryId(append.epoch, append.seq)
        return EntryId(append.epoch, log.last.seq + 1 if append.epoch == log.last.epoch else 0)

    def _collect(self, cursors: Mapping[str, EntryId], max_entries: int) -> dict[str, list[Entry]]:
        found = {}
        for name, cursor in cursors.items():
            self._drop_expired(name)
            log = self._logs.get(name)
            if log is not None and log.last > cursor:
                fresh = [entry for entry in log.entries if entry.id > cursor][:max_entries]
                if fresh:
                    found[name] = fresh
        return found
