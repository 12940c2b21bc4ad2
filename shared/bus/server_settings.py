"""Checks a Redis server's settings: whether logs and leases are safe in it."""

from collections.abc import Mapping, Sequence

_WANTED_POLICY = "noeviction"


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
