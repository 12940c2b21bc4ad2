"""Checks Redis servers: their kind, their version, and whether logs and leases are safe in them."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from redis.exceptions import RedisError, ResponseError

from shared.bus.cluster import Cluster, NotACluster
from shared.bus.pools import ClusterUrl
from shared.bus.replies import bus_error, fields_of, refused
from shared.bus.servers import OneServer, Servers
from shared.errors import BusUnavailable, SettingsError

_TIMEOUT_S = 5.0
_OLDEST_SERVER = (7, 0)  # the first with explicit epochs and automatic sequence: <epoch>-*
_WANTED_POLICY = "noeviction"


def servers_at(url: str, setting: str) -> Servers:
    """One server or a cluster, as the URL says.

    Args:
        setting: that has the URL, for errors.

    Raises:
        SettingsError: the URL cannot be used; its password is not shown.
    """
    try:
        of_cluster = ClusterUrl.parse(url)
        return OneServer(url) if of_cluster is None else Cluster(of_cluster)
    except ValueError:
        wanted = (
            "expected redis[s]://[user:password@]host:port/0, "
            "redis[s]+sentinel://[user:password@]host:port,host:port/service or "
            "redis[s]+cluster://[user:password@]host:port,host:port"
        )
        raise SettingsError(setting, _without_login(url), wanted) from None


class ServerCheck:
    """Checks the servers of a bus. Methods raise BusUnavailable if one of them does not answer.

    Args:
        url: of the servers.
        setting: that has the URL, for errors.
    """

    def __init__(self, servers: Servers, url: str, setting: str) -> None:
        self._servers = servers
        self._setting = setting
        parts = urlsplit(url)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="")
        self._place = place.geturl()  # without user and password

    async def version(self) -> str:
        """The oldest version.

        Raises:
            BusUnavailable: it is too old.
            SettingsError: the URL is that of one server, and this is one of several with a part of
                the keys each; or that of a cluster, and this is none.
        """
        try:
            infos = await self._replies("INFO", "server")
        except BusUnavailable as error:
            if isinstance(error.__cause__, NotACluster):
                reason = "this server is no node of a Redis Cluster: expected redis[s]://host:port"
                raise SettingsError(self._setting, self._place, reason) from None
            raise
        if isinstance(self._servers, OneServer) and _is_cluster_node(infos[""]):
            await self._check_has_all_slots()
        return min(map(_version_of, infos.values()), key=_number_of)

    async def warnings(self) -> Sequence[str]:
        """Warnings on settings with which requests may be lost."""
        return [
            f"{place}: {warning}" if place else warning
            for place, info in (await self._replies("INFO", "default")).items()
            for warning in settings_warnings(info)
        ]

    async def _check_has_all_slots(self) -> None:
        """Check that a node of a cluster is its only primary.

        Raises:
            SettingsError: it is not.
        """
        cluster = (await self._replies("CLUSTER", "INFO"))[""]
        if (size := int(cluster.get("cluster_size", 0))) > 1:
            scheme, _, place = self._place.partition("://")
            reason = (
                f"a node of a Redis Cluster of {size} primaries, which have a part of the keys "
                f"each: expected {scheme}+cluster://{place.partition('/')[0]}, with user and "
                "password if it has any"
            )
            raise SettingsError(self._setting, self._place, reason)

    async def _replies(self, *command: str) -> dict[str, dict[str, str]]:
        """The fields in each server's reply, by the server's place."""
        try:
            found = await self._servers.execute_on_all(command, _TIMEOUT_S)
        except (RedisError, OSError) as error:
            raise bus_error(error) from error
        for reply in found.values():
            if isinstance(reply, ResponseError):
                raise refused(reply)
        return {place: fields_of(reply) for place, reply in found.items()}


def settings_warnings(info: Mapping[str, str]) -> Sequence[str]:
    """Warnings on settings with which requests may be lost.

    Args:
        info: fields of the server's INFO; a missing field gives no warning.
    """
    found = []
    policy = info.get("maxmemory_policy", _WANTED_POLICY)
    if policy != _WANTED_POLICY:
        found.append(
            f"Redis has maxmemory-policy {policy}: when its memory is full it may delete logs and "
            f"leases; set {_WANTED_POLICY}"
        )
    if info.get("aof_enabled", "1") == "0":
        found.append(
            "Redis has appendonly off: accepted requests are lost when it is restarted; set "
            "appendonly yes and appendfsync everysec"
        )
    return found


def _is_cluster_node(info: Mapping[str, str]) -> bool:
    return "cluster" in (info.get("redis_mode"), info.get("server_mode"))  # the latter is Valkey's


def _version_of(info: Mapping[str, str]) -> str:
    version = info.get("valkey_version", info["redis_version"])
    if _number_of(version) < _OLDEST_SERVER:
        needed = ".".join(map(str, _OLDEST_SERVER))
        raise BusUnavailable(f"Redis {version} is too old: {needed} or newer is needed")
    return version


def _number_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _without_login(url: str) -> str:
    """A URL without user and password, for messages."""
    scheme, _, rest = url.rpartition("://")
    place = rest.rpartition("@")[2] if "@" in rest else "..."
    return f"{scheme}://{place}"
