"""Counts the bytes that each API key keeps in Redis, until they expire."""

import time
from collections.abc import Callable

from shared.bus.api import Bus

_BUCKETS = 24  # of the retention; bytes are counted until the bucket of their end has passed


class KeptBytes:
    """The bytes of one kind of thing, by API key and by when they expire.

    Args:
        key: of an API key's tally.
        retention_s: for which things are kept.
        limit: bytes of one API key.
        longest_s: for which any of them is kept, if that is longer.
    """

    def __init__(
        self,
        bus: Bus,
        key: Callable[[str], str],
        retention_s: float,
        limit: int,
        longest_s: float = 0.0,
    ) -> None:
        self.limit = limit
        self._bus = bus
        self._key = key
        self._retention_ms = int(1000 * retention_s)
        self._ttl_ms = 2 * int(1000 * max(retention_s, longest_s))

    async def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Whether an API key may keep so many bytes more."""
        return await self.add(tenant, time.time(), 0) + num_bytes <= self.limit

    async def add(self, tenant: str, until_s: float, num_bytes: int) -> int:
        """Count bytes that expire at a time, negative ones if they are deleted; the new sum."""
        oldest, bucket = self._bucket(time.time()), self._bucket(until_s)
        return await self._bus.tally(self._key(tenant), bucket, num_bytes, oldest, self._ttl_ms)

    def _bucket(self, when_s: float) -> int:
        return int(1000 * when_s * _BUCKETS / self._retention_ms)
