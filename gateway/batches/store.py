"""Keeps batches in Redis: a log with one entry for each, and the files that they write."""

import re
import time
from collections.abc import Callable
from dataclasses import replace

from gateway.batches.records import BatchState, Status
from gateway.files.records import OF_BATCH, FileInfo, FilePiece
from gateway.files.store import LONGEST_WINDOW_S, NEXT_TO_NOTHING_BYTES, PIECE_BYTES, FileStore
from gateway.http.errors import ApiError, overloaded
from gateway.http.pages import PageQuery
from gateway.jobs.claims import ClaimedLog
from gateway.jobs.kept_names import KeptNames
from gateway.jobs.records import MOST_QUEUED, QueuedJob
from shared.bus.api import START, Append, EntryId
from shared.codec import decode_as, encode
from shared.errors import StaleWriter

_ID = re.compile(r"batch_[0-9a-f]{32}")
_ATTEMPTS = 5
_MOST_ENTRIES = 64  # of the log: one, and those that a process that died did not drop
_FENCE = FilePiece(b"")  # the first entry of a claim, after which earlier ones cannot write


def unknown_batch(batch_id: str) -> ApiError:
    """404: there is none of this id, or it is another key's, or it is not kept any more."""
    return ApiError(
        404,
        f"No batch found with id {batch_id[:80]!r}: there was none, or the time for which batches "
        "are kept is over",
        param="batch_id",
        code="batch_not_found",
        rejection="invalid",
    )


class BatchStore:
    """The batches of one engine.

    Every method raises BusUnavailable.
    """

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self.bus = files.bus
        self.keys = files.keys
        self._names = KeptNames(
            files.bus, files.keys.batch_names, files.retention_s + LONGEST_WINDOW_S, "batches"
        )

    async def find(self, batch_id: str, tenant: str) -> BatchState:
        """A batch of an API key.

        Raises:
            ApiError: 404.
        """
        if _ID.fullmatch(batch_id) is None:
            raise unknown_batch(batch_id)
        state, _ = await self.read(batch_id)
        if state is None or state.tenant != tenant:
            raise unknown_batch(batch_id)
        return state

    async def read(self, batch_id: str) -> tuple[BatchState | None, EntryId]:
        """The state of a batch, None if there is none, and its place in the log."""
        log = self.keys.batch(batch_id)
        entries = (await self.bus.read({log: START}, 0, _MOST_ENTRIES)).get(log, [])
        if not entries:
            return None, START
        state: BatchState = decode_as(BatchState, entries[-1].messages[0])
        return state, entries[-1].id

    async def page(self, tenant: str, query: PageQuery) -> tuple[list[BatchState], bool]:
        """Batches of an API key, and whether there are more behind them.

        Raises:
            ApiError: 400, no batch has the id that should precede them.
        """
        found: list[BatchState] = []
        for name in query.behind(await self._names.all(tenant)):
            state, _ = await self.read(name)
            if state is None:
                continue
            if len(found) == query.limit:
                return found, True
            found.append(state)
        return found, False

    async def reader_of(self, tenant: str, file_id: str) -> str | None:
        """A batch of an API key that has not ended and reads a file; None if there is none."""
        queue = self.keys.batch_queue
        for entry in (await self.bus.read({queue: START}, 0, MOST_QUEUED)).get(queue, []):
            queued: QueuedJob = decode_as(QueuedJob, entry.messages[0])
            if queued.tenant == tenant:
                state, _ = await self.read(queued.id)
                if state is not None and state.input_file == file_id and not state.has_ended:
                    return queued.id
        return None

    async def begin(self, state: BatchState, instance: str) -> "BatchLog":
        """A new batch, claimed by this gateway.

        Raises:
            ApiError: 429, there is no room.
        """
        await self._names.check_room(state.tenant)
        log = BatchLog(self, state, instance, 1)
        await log.renew()
        await log.begin()
        await self.files.kept.add(state.tenant, state.counted_until_s, NEXT_TO_NOTHING_BYTES)
        await self._names.add(state.tenant, state.id)
        return log

    async def claim(
        self,
        batch_id: str,
        instance: str,
        change: Callable[[BatchState], BatchState] = lambda state: state,
    ) -> "BatchLog | None":
        """Become the one that finishes a batch; None: it has ended, or is forgotten.

        Args:
            change: of the state, written with the claim.

        Raises:
            StaleWriter: another gateway claims it just now.
        """
        state, last = await self.read(batch_id)
        if state is None or state.has_ended:
            return None
        log = BatchLog(self, change(state), instance, last.epoch + 1)
        await log.begin()
        await log.renew()
        return log

    async def is_claimed(self, batch_id: str) -> bool:
        """A gateway is at work."""
        return await self.bus.get(self.keys.batch_lease(batch_id)) is not None

    async def cancel(self, batch_id: str, instance: str) -> "BatchLog | None":
        """Claim a batch, and let it end without answers to its other lines; None: it has ended."""

        def change(state: BatchState) -> BatchState:
            if state.status not in (Status.VALIDATING, Status.IN_PROGRESS):
                return state
            now_s = int(time.time())
            return replace(
                state, status=Status.CANCELLING, ends_as=Status.CANCELLED, cancelling_s=now_s
            )

        for _ in range(_ATTEMPTS):
            try:
                return await self.claim(batch_id, instance, change)
            except StaleWriter:
                continue
        raise overloaded("other calls change this batch")


class BatchLog(ClaimedLog):
    """Writes the state of one batch, and its files, while no other gateway claims it.

    Attributes:
        state: as it was written last.
    """

    def __init__(self, store: BatchStore, state: BatchState, instance: str, epoch: int) -> None:
        log, lease = store.keys.batch(state.id), store.keys.batch_lease(state.id)
        super().__init__(store.bus, state.id, log, lease, instance, epoch)
        self.state = state
        self._store = store
        self._files = store.files

    async def begin(self) -> None:
        """Write the first entries of the claim: earlier ones can write nothing any more."""
        state = self.state
        fences = [self._piece(name, _FENCE) for name in (state.output_file, state.error_file)]
        await self.append([encode(state)], replaces=True, beside=fences, is_first=True)
        ttl_ms = self._ttl_ms(state.counted_until_s)
        await self._expire(ttl_ms, ttl_ms)

    async def write(self, state: BatchState, output: bytes = b"", errors: bytes = b"") -> int:
        """Write the state, and what comes to the files with it: all of it, or nothing.

        Returns:
            Bytes that the API key keeps now.

        Raises:
            StaleWriter: another gateway has claimed the batch.
        """
        state = replace(
            state,
            output_bytes=self.state.output_bytes + len(output),
            error_bytes=self.state.error_bytes + len(errors),
        )
        pieces = [
            self._piece(name, FilePiece(data[start : start + PIECE_BYTES]))
            for name, data in ((state.output_file, output), (state.error_file, errors))
            for start in range(0, len(data), PIECE_BYTES)
        ]
        await self.append([encode(state)], replaces=True, beside=pieces)
        self.state = state
        num_bytes = len(output) + len(errors)
        return await self._files.kept.add(state.tenant, state.counted_until_s, num_bytes)

    async def end(self, status: Status) -> None:
        """Let clients find the files, and write the end; all of the files has been written.

        Raises:
            StaleWriter: another gateway has claimed the batch.
        """
        state, now_s = self.state, int(time.time())
        until_s = now_s + state.retention_s
        keys = self._store.keys
        written = (
            (state.output_file, "output", state.output_bytes),
            (state.error_file, "error", state.error_bytes),
        )
        for name, what, num_bytes in written:
            info = FileInfo(
                id=name,
                tenant=state.tenant,
                filename=f"{state.id}_{what}.jsonl",
                purpose=OF_BATCH,
                num_bytes=num_bytes,
                created_s=now_s,
                expires_s=until_s,
                counted_until_s=state.counted_until_s,
            )
            if num_bytes:
                await self._files.publish(info)
        await self.write(replace(state, status=status, ended_s=now_s))
        empty = [keys.file_pieces(name) for name, _, num_bytes in written if not num_bytes]
        if empty:
            await self._bus.delete(*empty)
        await self._expire(self._ttl_ms(now_s + int(self._files.retention_s)), None)
        await self.drop_lease()

    def _piece(self, file_id: str, piece: FilePiece) -> Append:
        return Append(self._store.keys.file_pieces(file_id), [encode(piece)], self.epoch)

    async def _expire(self, own_ms: int, files_ms: int | None) -> None:
        keys, state = self._store.keys, self.state
        await self._bus.expire(keys.batch(state.id), own_ms)
        if files_ms is not None:
            for name in (state.output_file, state.error_file):
                await self._bus.expire(keys.file_pieces(name), files_ms)

    @staticmethod
    def _ttl_ms(until_s: int) -> int:
        return max(60_000, int(1000 * (until_s - time.time())))
