"""Counts connections by address, and closes idle ones to make room for new ones."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

from gateway.access.networks import Network, address_of, subscriber_of
from gateway.http.errors import ApiError, busy, busy_address


class Connection(Protocol):
    """A connection that the table may close."""

    def evict(self) -> None:
        """Close, as another connection needs the place."""


class ConnectionTable:
    """Counts connections, all together and by address.

    A connection is idle while no request of it is being answered: before its first request, between
    two, and while the head of one arrives. If there are too many connections, a new one replaces
    the one that has been idle longest: of the same address if that has too many, else of all.

    Args:
        max_connections: all together.
        max_per_address: from one IPv4 address, or one IPv6 network of a subscriber.
        trusted: addresses of proxies, whose connections belong to many clients.
    """

    def __init__(
        self, max_connections: int, max_per_address: int, trusted: Sequence[Network]
    ) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._trusted = tuple(trusted)
        self._origins: dict[Connection, str] = {}
        self._num_of: Counter[str] = Counter()  # connections, by origin
        self._idle: dict[Connection, None] = {}  # longest idle first
        self._idle_of: defaultdict[str, dict[Connection, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, connection: Connection, address: str | None) -> ApiError | None:
        """Count a new connection, which is idle; return an error if there is no room for it.

        Args:
            address: of the client, None if it has none.
        """
        origin = self._origin_of(address)
        if origin and self._num_of[origin] >= self._max_per_address:
            if not self._make_room(self._idle_of.get(origin, {})):
                return busy_address(self._max_per_address)
        elif len(self._origins) >= self._max_connections and not self._make_room(self._idle):
            return busy(self._max_connections)
        self._origins[connection] = origin
        self._num_of[origin] += 1
        self.set_idle(connection)
        return None

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is in the table."""
        self.set_busy(connection)
        origin = self._origins.pop(connection, None)
        if origin is None:
            return
        self._num_of[origin] -= 1
        if not self._num_of[origin]:
            del self._num_of[origin]

    def set_idle(self, connection: Connection) -> None:
        """Mark a connection: no request of it is being answered."""
        origin = self._origins.get(connection)
        if origin is not None:
            self._idle[connection] = None
            self._idle_of[origin][connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Mark a connection: a request of it is being answered."""
        origin = self._origins.get(connection)
        if origin is None or connection not in self._idle:
            return
        del self._idle[connection]
        idle = self._idle_of[origin]
        del idle[connection]
        if not idle:
            del self._idle_of[origin]

    def _make_room(self, idle: dict[Connection, None]) -> bool:
        """Close the connection that has been idle longest; False if there is none."""
        oldest = next(iter(idle), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.evict()
        return True

    def _origin_of(self, address: str | None) -> str:
        """The address or network by which a connection is counted, "" for no limit."""
        found = address_of(address or "")
        if found is None or any(found in network for network in self._trusted):
            return ""
        return subscriber_of(found)
