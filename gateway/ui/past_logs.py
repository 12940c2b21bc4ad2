"""Reads a stretch of an engine's logs, in bounded pieces."""

from collections.abc import Sequence

from shared.bus.api import START, Bus, Entry, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode
from shared.errors import DecodeError
from shared.messages.plans import StepPlan

MOST_PLANS = 4_000
_MOST_OUTPUTS = 6_000
_MOST_BYTES = 24 << 20  # of all entries of a stretch
_PAGE = 200  # entries per read
_WINDOW_MS = 20_000  # in which a snapshot is looked for first
_LAST_SEQ = (1 << 63) - 1
Packed = list[tuple[str, tuple[bytes, ...]]]


class PastLogs:
    """The logs of one engine."""

    def __init__(self, bus: Bus, engine_id: str) -> None:
        self._bus = bus
        self._keys = EngineKeys(engine_id)

    async def span(self) -> tuple[int, int] | None:
        """First and last moment of which there are snapshots, in milliseconds; None if of none."""
        first = await self._first_after(START)
        if first is None:
            return None
        last = await self._bus.last_id(self._keys.snapshots)
        now_ms = await self._bus.now_ms()
        return first.id.epoch + first.id.seq, max(last.epoch + last.seq, now_ms)

    async def stretch(self, since_ms: int, until_ms: int) -> dict[str, Packed]:
        """Snapshots, plans and outputs of a stretch; empty if there is no snapshot before it."""
        snapshot = await self._snapshot_before(since_ms)
        if snapshot is None:
            return {"snapshots": [], "plans": [], "outputs": []}
        keys = self._keys
        left = _MOST_BYTES
        plans, left = await self._entries(
            keys.plans, EntryId(snapshot.id.epoch, 0), MOST_PLANS, left, until_ms
        )
        outputs, left = await self._entries(
            keys.outputs, EntryId(snapshot.id.epoch, 0), _MOST_OUTPUTS, left, None
        )
        later, _ = await self._entries(keys.snapshots, snapshot.id, 32, left, None)
        later = [entry for entry in later if entry.id.epoch + entry.id.seq <= until_ms]
        return {
            "snapshots": _packed([snapshot, *later]),
            "plans": _packed(plans),
            "outputs": _packed(outputs),
        }

    async def everything(self) -> dict[str, Packed]:
        """All that is left of requests, plans and outputs, as far as the bounds allow."""
        left = _MOST_BYTES
        found = {}
        for name, log in (
            ("requests", self._keys.requests),
            ("plans", self._keys.plans),
            ("outputs", self._keys.outputs),
        ):
            entries, left = await self._entries(log, START, 3 * _MOST_OUTPUTS, left, None)
            found[name] = _packed(entries)
        return found

    async def _entries(
        self, log: str, after: EntryId, most: int, most_bytes: int, until_ms: int | None
    ) -> tuple[list[Entry], int]:
        """Entries after an id, and the bytes that are left for others."""
        entries: list[Entry] = []
        while len(entries) < most and most_bytes > 0:
            page = (await self._bus.read({log: after}, 0, _PAGE)).get(log, [])
            entries += page
            most_bytes -= sum(entry.num_bytes for entry in page)
            if len(page) < _PAGE or (until_ms is not None and _is_after(page[-1], until_ms)):
                break
            after = page[-1].id
        return entries, most_bytes

    async def _snapshot_before(self, at_ms: int) -> Entry | None:
        """The last snapshot before a moment, or the first one after it."""
        epoch = await self._epoch_at(at_ms)
        if epoch is None:
            return None
        log = self._keys.snapshots
        back_ms = _WINDOW_MS
        while True:
            since = EntryId(epoch, max(0, at_ms - epoch - back_ms))
            found: Entry | None = None
            while page := (await self._bus.read({log: since}, 0, 8)).get(log, []):
                past = [e for e in page if e.id.epoch == epoch and epoch + e.id.seq <= at_ms]
                found = past[-1] if past else found
                if len(past) < len(page):
                    break
                since = page[-1].id
            if found is not None or since.seq == 0 or back_ms > at_ms - epoch:
                return found or await self._first_after(EntryId(epoch, 0))
            back_ms *= 8

    async def _epoch_at(self, at_ms: int) -> int | None:
        """The epoch of a moment, or the first."""
        first = await self._first_after(START)
        if first is None:
            return None
        epoch = first.id.epoch
        while (later := await self._first_after(EntryId(epoch, _LAST_SEQ))) is not None:
            if later.id.epoch > at_ms:
                break
            epoch = later.id.epoch
        return epoch

    async def _first_after(self, after: EntryId) -> Entry | None:
        log = self._keys.snapshots
        return next(iter((await self._bus.read({log: after}, 0, 1)).get(log, [])), None)


def _is_after(entry: Entry, until_ms: int) -> bool:
    """Whether a plan was made after a moment."""
    try:
        plan = decode(entry.messages[0])
    except DecodeError:
        return False
    return isinstance(plan, StepPlan) and plan.now_ms > until_ms


def _packed(entries: Sequence[Entry]) -> Packed:
    return [(str(entry.id), entry.messages) for entry in entries]
