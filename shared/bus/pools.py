"""Makes redis-py's connections from a URL: to one server, or to the primary that Sentinels name.

Of a Redis Cluster, the URLs of its nodes are made from that of the cluster.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

CONNECT_TIMEOUT_S = 5.0
_PORT, _SENTINEL_PORT = 6379, 26379
_SENTINEL_TIMEOUT_S = 1.0  # of each Sentinel; another one is asked after that
_SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}  # whether servers speak TLS
_CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_SENTINEL_OPTIONS = _TLS_OPTIONS | {"db", "sentinel_username", "sentinel_password"}


def pool_of(url: str) -> ConnectionPool:
    """What makes the connections of a bus; it keeps none itself.

    Raises:
        ValueError: the URL cannot be used.
    """
    # No retries: an append whose reply was lost must not be sent again. No socket timeout,
    # either: redis-py keeps it with ``asyncio.wait_for``, which on Python 3.11 loses a
    # cancellation that arrives together with the end of a write. ServerConnection has its own.
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 0,
        "protocol": 2,
    }
    if urlsplit(url).scheme in _SCHEMES:
        return _sentinel_pool(url, options)
    return ConnectionPool.from_url(url, **options)


async def close_pool(pool: ConnectionPool) -> None:
    """Close connections to Sentinels, if there are any; those to servers are the bus's."""
    if isinstance(pool, _PrimaryPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


class _PrimaryPool(SentinelConnectionPool):
    """Each connection goes to the server that is the primary when it is opened.

    A connection to a server that was a primary breaks: Sentinels close it, and an error for a
    read-only server does too.
    """

    def make_connection(self) -> Connection:
        connection: Connection = super().make_connection()  # type: ignore[no-untyped-call]
        return connection


def _sentinel_pool(url: str, options: dict[str, Any]) -> ConnectionPool:
    """The pool of ``redis+sentinel://[user:password@]host[:port],.../service[?db=0&...]``."""
    parts = urlsplit(url)
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    service = unquote(parts.path.strip("/"))
    if not service or "/" in service:
        raise ValueError("no name of a service")
    query = _options(parts, _SENTINEL_OPTIONS)
    of_sentinels = {
        name.removeprefix("sentinel_"): query.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in query
    }
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [_address(place, _SENTINEL_PORT) for place in places.split(",")],
        sentinel_kwargs={
            **of_sentinels,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": _SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
            "protocol": 2,
        },
    )
    return _PrimaryPool(  # type: ignore[no-untyped-call]
        service,
        sentinel,
        ssl=_SCHEMES[parts.scheme],
        db=int(query.pop("db", "0")),
        username=unquote(user) or None,
        password=unquote(password) or None,
        **query,
        **options,
    )


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """``redis+cluster://[user:password@]host[:port],...[/0][?ssl_ca_certs=FILE&...]``.

    Attributes:
        places: host and port of some nodes.
    """

    places: tuple[tuple[str, int], ...]
    _parts: SplitResult

    @staticmethod
    def parse(url: str) -> "ClusterUrl | None":
        """The parts of a cluster's URL; None: it is the URL of something else.

        Raises:
            ValueError: it cannot be used.
        """
        parts = urlsplit(url)
        if parts.scheme not in _CLUSTER_SCHEMES:
            return None
        if parts.path not in ("", "/", "/0") or parts.fragment:
            raise ValueError("a cluster has the database 0 only")
        _options(parts, _TLS_OPTIONS)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        return ClusterUrl(tuple(_address(host, _PORT) for host in hosts), parts)

    def at(self, host: str, port: int) -> str:
        """The URL of one node, with the user, the password and the options of this one."""
        login, at, _ = self._parts.netloc.rpartition("@")
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        scheme = _CLUSTER_SCHEMES[self._parts.scheme]
        found = self._parts._replace(scheme=scheme, netloc=f"{login}{at}{place}", path="/0")
        return found.geturl()


def _options(parts: SplitResult, allowed: Set[str]) -> dict[str, str]:
    """What stands behind the question mark.

    Raises:
        ValueError: an option is none of those that are allowed.
    """
    found = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if unknown := found.keys() - allowed:
        raise ValueError(f"unknown options {sorted(unknown)}")
    return found


def _address(place: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{place}")
    if not parts.hostname:
        raise ValueError(f"no host in {place!r}")
    return parts.hostname, parts.port or default_port
