"""The bus's server, which can be away, forget its last writes and go back in time.

What it keeps is a MemoryBus. A journal of all writes, in their order over all logs and keys, tells
what is left when the end of it is lost.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.api import START, Append, Entry, EntryId
from shared.bus.memory import MemoryBus
from shared.errors import StaleWriter
from tests.simulation.deployment.loop import Sleep, VirtualLoop

_FIRST_MS = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class _Deletion:
    """``DEL`` of a log; of "", ``FLUSHALL``."""

    log: str


@dataclass(frozen=True, slots=True)
class _Value:
    key: str
    value: bytes
    expires_ms: int


class Server:
    """One server, through all its restarts.

    Args:
        loop: whose time it is.

    Attributes:
        loop: the same.
        is_away: it does not answer.
        num_losses: restarts that lost writes, and deletions.
        memory_share: of its limit, which is never reached.
        accepts_all: ids are not compared; entries of stale writers are appended nevertheless.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.is_away = False
        self.num_losses = 0
        self.accepts_all = False
        self.memory_share = 0.0
        self.incarnation = 0
        self.loop = loop
        self._skew_ms = 0
        self._num_outages = 0
        self._journal: list[list[Append] | _Value | _Deletion | str] = []
        self._bus = MemoryBus(self.clock_ms)
        self._waiting: dict[str, list[Sleep]] = {}

    def clock_ms(self) -> int:
        """The server's own clock."""
        return _FIRST_MS + int(self.loop.time() * 1000) + self._skew_ms

    @property
    def num_writes(self) -> int:
        """That it remembers."""
        return len(self._journal)

    def num_writes_from_last(self, log: str) -> int:
        """So many were the last append to a log and all that came behind it."""
        for count, write in enumerate(reversed(self._journal), start=1):
            if isinstance(write, list) and any(append.log == log for append in write):
                return count
        return 0

    def entries(self, log: str) -> list[Entry]:
        """All that a log holds."""
        return _at_once(self._bus.read({log: START}, 0, 1_000_000)).get(log, [])

    def last_epoch(self, log: str) -> int:
        """Of the last entry."""
        return _at_once(self._bus.last_id(log)).epoch

    @property
    def connection(self) -> tuple[int, int]:
        """Changes when all connections break."""
        return self.incarnation, self._num_outages

    # ------------------------------------------------------------------ faults

    def go_away(self) -> None:
        """Break all connections and do not answer."""
        self.is_away = True
        self._num_outages += 1
        self._wake_all()

    def come_back(self) -> None:
        """Answer again."""
        self.is_away = False
        self._wake_all()

    def restart(self, num_lost: int, skew_ms: int) -> None:
        """Come back without the last writes.

        Args:
            num_lost: so many.
            skew_ms: added to the clock.
        """
        kept = self._journal[: len(self._journal) - num_lost]
        self.num_losses += num_lost > 0
        self.incarnation += 1
        self._skew_ms += skew_ms
        self._journal = []
        self._bus = MemoryBus(self.clock_ms)
        for write in kept:
            if isinstance(write, list):
                self.append_all(write)
            elif isinstance(write, str):
                self.add_engine(write)
            elif isinstance(write, _Deletion):
                self.delete(write.log)
            elif write.expires_ms > self.clock_ms():
                self.put(write.key, write.value, write.expires_ms - self.clock_ms())
        self._wake_all()

    def delete(self, log: str) -> None:
        """Forget a log, its ids included; "" is all logs and keys."""
        self.num_losses += 1
        self._journal.append(_Deletion(log))
        if log:
            self._bus._logs.pop(log, None)
        else:
            self._bus = MemoryBus(self.clock_ms)

    def replace(self, log: str, entries: list[Entry]) -> None:
        """Keep only these entries of a log; the next id is what it would have been."""
        self.num_losses += 1
        self._bus._logs[log].entries = entries

    # ---------------------------------------------------------------- commands

    def append_all(self, appends: Sequence[Append]) -> list[EntryId]:
        """One transaction."""
        ids, done, refused = [], [], None
        for append in appends:
            try:
                at = self._append(append)
            except StaleWriter as error:
                refused = error
                continue
            ids.append(at)
            done.append(Append(append.log, append.messages, at.epoch, at.seq, append.trim_below))
        if done:
            self._journal.append(done)
            for append in done:
                self._wake(append.log)
        if refused is not None:
            raise refused
        return ids

    def _append(self, append: Append) -> EntryId:
        try:
            return _at_once(self._bus.append(append))
        except StaleWriter:
            if not self.accepts_all:
                raise
            last = _at_once(self._bus.last_id(append.log))
            return _at_once(
                self._bus.append(Append(append.log, append.messages, last.epoch, last.seq + 1))
            )

    def put(self, key: str, value: bytes, ttl_ms: int) -> None:
        self._journal.append(_Value(key, value, self.clock_ms() + ttl_ms))
        _at_once(self._bus.put(key, value, ttl_ms))

    def add_engine(self, engine_id: str) -> None:
        if engine_id not in _at_once(self._bus.engines()):
            self._journal.append(engine_id)
            _at_once(self._bus.add_engine(engine_id))

    def read(self, cursors: Mapping[str, EntryId], max_entries: int) -> dict[str, list[Entry]]:
        """What is there already."""
        found: dict[str, list[Entry]] = _at_once(self._bus.read(cursors, 0, max_entries))
        return found

    def ask(self, question: Callable[[MemoryBus], Coroutine[Any, Any, Any]]) -> Any:
        """Whatever changes nothing."""
        return _at_once(question(self._bus))

    def changed(self, logs: Iterable[str], until_s: float) -> Sleep:
        """Over when something was appended to one of the logs or connections broke, or then."""
        waiter = Sleep(self.loop, until_s)
        for log in logs:
            self._waiting.setdefault(log, []).append(waiter)
        return waiter

    def _wake(self, log: str) -> None:
        for waiter in self._waiting.pop(log, ()):
            waiter.end()

    def _wake_all(self) -> None:
        for log in list(self._waiting):
            self._wake(log)


def _at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
