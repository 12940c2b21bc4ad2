"""The bus: append-only logs read by cursor, plus keys that expire.

A log is a list of entries in the order of their ids. A reader keeps its own cursor; nothing is
acknowledged and nothing is consumed. Writers put the epoch into the id, so that the log itself
refuses a writer of an earlier epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class EntryId(NamedTuple):
    """Position of an entry in a log; ordered like the log."""

    epoch: int  # milliseconds of Redis time, or the epoch of the writer
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @staticmethod
    def parse(text: str | bytes) -> "EntryId":
        """The id that ``str`` wrote.

        Raises:
            ValueError: the text is no entry id.
        """
        epoch, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return EntryId(int(epoch), int(seq))


ENTRY_BYTES = 32
"""Memory of an entry beside its messages: 12 to 74 bytes were measured with Valkey 9.1."""

START = EntryId(0, 0)
"""Before the first entry of any log."""


class Entry(NamedTuple):
    """One append: one or more encoded messages that became visible together."""

    id: EntryId
    messages: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the entry in the server."""
        return ENTRY_BYTES + sum(map(len, self.messages))


@dataclass(frozen=True, slots=True)
class Append:
    """An entry to append to a log.

    Attributes:
        epoch: the id becomes ``<epoch>-<next>``; None: the bus's clock gives the id.
        seq: with ``epoch``: the exact second half of the id.
        trim_below: entries with smaller ids are dropped if the append succeeds. If the server has
            no memory for it, they are dropped first, and the append is tried once more.
    """

    log: str
    messages: Sequence[bytes]
    epoch: int | None = None
    seq: int | None = None
    trim_below: EntryId | None = None


class Bus(Protocol):
    """Every method raises BusUnavailable when the server does not answer."""

    async def append(self, append: Append) -> EntryId:
        """Append one entry; never retried here.

        Raises:
            StaleWriter: the id is not above the log's last one.
        """

    async def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        """Append in one transaction: no reader sees one entry without the others.

        In a Redis Cluster, the logs must share a hash tag, as those of an engine do.

        Raises:
            StaleWriter: at least one was refused; the others were executed.
        """

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        """Entries after each log's cursor, at most ``max_entries`` per log.

        Waits up to ``block_ms`` for the first entry; 0 does not wait. In a Redis Cluster, the logs
        must share a hash tag.
        """

    async def trim(self, log: str, below: EntryId) -> int:
        """Drop entries with smaller ids; their number.

        For when memory is short, or behind an append of which the caller has the reply. Otherwise
        appends trim, so that a refused writer trims nothing.
        """

    async def memory_share(self) -> float:
        """Share of the server's memory limit that is in use; 0.0 if it has none."""

    async def last_id(self, log: str) -> EntryId:
        """Id of the last entry ever appended, START for a new log."""

    async def length(self, log: str) -> int:
        """Number of entries in the log."""

    async def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        """Set a key that expires after ``ttl_ms``.

        If the server has no memory for the value, the key keeps its old one for as long.
        """

    async def get(self, key: str) -> bytes | None:
        """Value of a key, None if it is not there or has expired."""

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of keys, of at least one, in one command for each server that has some."""

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl_ms: int) -> bool:
        """Set a key that expires if it has the value ``old``, None for no value; whether it had."""

    async def expire(self, key: str, ttl_ms: int) -> bool:
        """Set when a log or a value expires, in place of an earlier time; False: it is missing."""

    async def delete(self, *keys: str) -> int:
        """Delete logs and values; how many there were."""

    async def tally(self, key: str, bucket: int, amount: int, oldest: int, ttl_ms: int) -> int:
        """Add ``amount`` to a bucket of a tally; the sum of all its buckets.

        Args:
            oldest: buckets with smaller numbers are dropped.
            ttl_ms: the tally expires so long after its last use.
        """

    async def add_engine(self, engine_id: str) -> None:
        """Add an engine to the set of all engines."""

    async def engines(self) -> list[str]:
        """All engines that were ever added, sorted."""

    async def now_ms(self) -> int:
        """The bus's own clock, from which all numbers of epochs come."""

    async def run_id(self) -> str:
        """An id that changes when the server restarts, or another one has the logs."""

    async def close(self) -> None:
        """Release connections. No method may be called afterwards."""
