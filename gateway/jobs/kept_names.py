"""Lists what an API key keeps in Redis, in the order in which it was made."""

import time
from collections.abc import Callable

from gateway.http.errors import ApiError
from gateway.jobs.records import KeptName
from shared.bus.api import START, Append, Bus, EntryId
from shared.codec import decode_as, encode

_MOST_NAMES = 10_000  # of one API key
_NAMES_AT_ONCE = 1_000


class KeptNames:
    """The ids of things of one kind, by API key. Some may have been deleted, or have expired.

    Args:
        key: of an API key's list.
        longest_s: so long a thing is kept at most.
        what: the things, for the message that there are too many.
    """

    def __init__(self, bus: Bus, key: Callable[[str], str], longest_s: float, what: str) -> None:
        self._bus = bus
        self._key = key
        self._longest_ms = int(1000 * longest_s)
        self._what = what

    async def check_room(self, tenant: str) -> None:
        """Refuse one more.

        Raises:
            ApiError: 429.
        """
        if await self._bus.length(self._key(tenant)) >= _MOST_NAMES:
            days = self._longest_ms / 86_400_000
            message = f"there were {_MOST_NAMES} {self._what} with this API key in {days:.3g} days"
            raise ApiError(429, message, code="too_many_kept", rejection="overloaded")

    async def add(self, tenant: str, name: str) -> None:
        """Add an id behind all others; those of things that must have expired are dropped."""
        key, oldest_ms = self._key(tenant), int(1000 * time.time()) - self._longest_ms
        oldest = EntryId(max(0, oldest_ms), 0)
        await self._bus.append(Append(key, [encode(KeptName(name))], trim_below=oldest))
        await self._bus.expire(key, self._longest_ms)

    async def all(self, tenant: str) -> list[str]:
        """All ids, each once, the oldest first."""
        key, cursor = self._key(tenant), START
        found: dict[str, None] = {}
        while True:
            entries = (await self._bus.read({key: cursor}, 0, _NAMES_AT_ONCE)).get(key, [])
            for entry in entries:
                named: KeptName = decode_as(KeptName, entry.messages[0])
                found[named.id] = None
                cursor = entry.id
            if len(entries) < _NAMES_AT_ONCE:
                return list(found)
