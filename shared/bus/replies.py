"""What Redis replied: errors as exceptions of the bus, entries of logs, fields of texts."""

from typing import Any

from redis.exceptions import AskError, AuthenticationError, RedisError, ResponseError

from shared.bus.api import Entry, EntryId
from shared.errors import BusUnavailable, LoginRefused


def bus_error(error: RedisError | OSError) -> BusUnavailable:
    """The error for a command that got no reply."""
    if isinstance(error, AuthenticationError):
        return LoginRefused(f"Redis refused user or password: {error}")
    if isinstance(error, ResponseError):  # to the login
        return refused(error)
    return BusUnavailable(f"Redis does not answer: {error}")


def refused(error: Exception) -> BusUnavailable:
    """The error for a reply such as out of memory, read only, or still loading."""
    if isinstance(error, AskError):
        where = f"another node of a Redis Cluster has the keys, {error}"
        return BusUnavailable(f"Redis refused: {where}: redis+cluster:// goes there")
    return BusUnavailable(f"Redis refused: {error}")


def entry_of(raw: Any) -> Entry:
    """An entry in a reply to XREAD."""
    entry_id, fields = raw
    return Entry(EntryId.parse(entry_id), tuple(fields[1::2]))


def fields_of(reply: bytes | str) -> dict[str, str]:
    """Fields of a reply with a line for each, by name."""
    pairs = (line.partition(":") for line in text_of(reply).splitlines() if ":" in line)
    return {key: value for key, _, value in pairs}


def text_of(value: bytes | str) -> str:
    """A reply as text."""
    return value.decode() if isinstance(value, bytes) else value
