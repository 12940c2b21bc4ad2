"""Keeps responses in Redis: one log for each, the bytes of each API key counted."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gateway.http.errors import ApiError, overloaded
from gateway.jobs.claims import ClaimedLog
from gateway.jobs.kept_bytes import KeptBytes
from gateway.responses.records import (
    CANCELLED,
    DELETED,
    ResponseAsked,
    ResponseClaimed,
    ResponseEnded,
    ResponseTokens,
)
from shared.bus.api import START, Append, Bus, Entry, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode, encode
from shared.errors import StaleWriter
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ENTRIES_AT_ONCE = 64
_TOMBSTONE_MS = 60_000  # a gateway that still works on a deleted response finds out
_PROMPT_END_TOKENS = 256  # in which the answer's message may have begun
_ATTEMPTS = 5


def unknown_response(response_id: str, field: str | None = None) -> ApiError:
    """404: there is none of this id, or it is another key's, or it is not kept any more.

    Args:
        field: of the request that names it; None: its path does.
    """
    where = "" if field is None else f"{field}: "
    return ApiError(
        404,
        f"{where}Response with id {response_id[:80]!r} not found: there was none, or it was "
        "deleted, or the time for which responses are kept is over",
        param=field,
        code="response_not_found" if field is None else "previous_response_not_found",
        rejection="invalid",
    )


@dataclass(slots=True)
class StoredResponse:
    """What the log of one response says so far.

    Attributes:
        tokens, logprobs: of the answer.
        last: id of the last entry.
        num_bytes: of the log's messages.
    """

    asked: ResponseAsked | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: ResponseEnded | None = None
    last: EntryId = START
    num_bytes: int = 0

    def apply(self, entry: Entry) -> None:
        """Take the next entry; one that asks again replaces all before it."""
        for data in entry.messages:
            given = decode(data)
            if isinstance(given, ResponseAsked):
                self.asked, self.tokens, self.logprobs, self.num_bytes = given, [], [], 0
            elif isinstance(given, ResponseTokens):
                self.tokens += given.tokens.tolist()
                self.logprobs += given.logprobs
            elif isinstance(given, ResponseEnded):
                self.ended = given
            self.num_bytes += len(data)
        self.last = entry.id


class ResponseStore:
    """The responses of one engine.

    Every method raises BusUnavailable.

    Args:
        retention_s: so long a response is kept after its end.
        max_bytes: of the responses of one API key.
    """

    def __init__(self, bus: Bus, keys: EngineKeys, retention_s: float, max_bytes: int) -> None:
        self.bus = bus
        self.keys = keys
        self.kept = KeptBytes(bus, keys.response_bytes, retention_s, max_bytes)
        self._retention_s = retention_s
        self._retention_ms = int(1000 * retention_s)

    # ---------------------------------------------------------------- one response

    async def find(self, response_id: str, tenant: str, field: str | None = None) -> StoredResponse:
        """A response of an API key.

        Args:
            field: of the request that names it; None: its path does.

        Raises:
            ApiError: 404.
        """
        if _ID.fullmatch(response_id) is None:
            raise unknown_response(response_id, field)
        found = await self.read(response_id)
        if found.asked is None or found.asked.tenant != tenant:
            raise unknown_response(response_id, field)
        return found

    async def read(self, response_id: str) -> StoredResponse:
        """All that is known of a response; nothing, if there is none."""
        log, found = self.keys.response(response_id), StoredResponse()
        while True:
            entries = (await self.bus.read({log: found.last}, 0, _ENTRIES_AT_ONCE)).get(log, ())
            for entry in entries:
                found.apply(entry)
            if len(entries) < _ENTRIES_AT_ONCE:
                return found

    async def keep(
        self,
        asked: ResponseAsked,
        tokens: ResponseTokens,
        ended: ResponseEnded,
    ) -> None:
        """Keep a response that has ended; nothing happens if it is there."""
        log = self.keys.response(asked.id)
        messages = [encode(_slim(asked)), encode(tokens), encode(ended)]
        try:
            await self.bus.append(Append(log, messages, 1, 0))
        except StaleWriter:
            return  # a repetition of the call
        await self.bus.expire(log, self._retention_ms)
        await self._count(asked, sum(map(len, messages)))

    async def begin(self, asked: ResponseAsked, instance: str) -> "ResponseLog | None":
        """A response for the background, claimed by this gateway; None: it is there."""
        first = [encode(asked), encode(ResponseClaimed(instance))]
        log = ResponseLog(self, asked.id, instance, 1, StoredResponse(asked))
        await log.renew()
        try:
            await self.bus.append(Append(self.keys.response(asked.id), first, 1, 0))
        except StaleWriter:
            return None
        await self.bus.expire(self.keys.response(asked.id), 2 * self._retention_ms)
        await self._count(asked, sum(map(len, first)))
        log.num_counted = sum(map(len, first))
        return log

    async def claim(self, response_id: str, instance: str) -> "ResponseLog | None":
        """Become the one that finishes a response; None: it has ended, or is forgotten.

        Raises:
            StaleWriter: another gateway claims it just now.
        """
        found = await self.read(response_id)
        if found.asked is None or found.ended is not None:
            return None
        epoch = found.last.epoch + 1
        claim = [encode(ResponseClaimed(instance))]
        await self.bus.append(Append(self.keys.response(response_id), claim, epoch, 0))
        log = ResponseLog(self, response_id, instance, epoch, found)
        log.num_counted = found.num_bytes
        await log.renew()
        return log

    async def is_claimed(self, response_id: str) -> bool:
        """A gateway is at work."""
        return await self.bus.get(self.keys.response_lease(response_id)) is not None

    async def cancel(self, found: StoredResponse, instance: str) -> StoredResponse:
        """End a response that goes on; whoever works on it finds out."""
        assert found.asked is not None
        for _ in range(_ATTEMPTS):
            try:
                log = await self.claim(found.asked.id, instance)
                if log is not None:
                    await log.end(ResponseEnded(CANCELLED, int(time.time())))
            except StaleWriter:
                continue
            return await self.read(found.asked.id)
        raise overloaded("other calls change this response")

    async def delete(self, found: StoredResponse) -> None:
        """Forget a response, and end it."""
        assert found.asked is not None
        log = self.keys.response(found.asked.id)
        for _ in range(_ATTEMPTS):
            last = EntryId((await self.bus.last_id(log)).epoch + 1, 0)
            deleted = [encode(ResponseEnded(DELETED, int(time.time())))]
            try:
                await self.bus.append(Append(log, deleted, last.epoch, 0, trim_below=last))
            except StaleWriter:
                continue
            await self.bus.expire(log, _TOMBSTONE_MS)
            await self._count(found.asked, -found.num_bytes)
            return
        raise overloaded("other calls change this response")

    async def ended(self, log: "ResponseLog", num_bytes: int) -> None:
        """Let the log of a response that has ended expire, and count what it holds."""
        assert log.stored.asked is not None
        await self.bus.expire(self.keys.response(log.id), self._retention_ms)
        await self._count(log.stored.asked, num_bytes - log.num_counted)
        await log.drop_lease()

    # ---------------------------------------------------------------------- bytes

    def no_room(self, is_redis_full: bool) -> ApiError:
        """429: what one API key may keep is full, or Redis is."""
        why = "Redis is short of memory"
        if not is_redis_full:
            why = f"the responses of one API key may have {self.kept.limit} bytes together"
        return ApiError(
            429,
            f"store=True: {why}; delete some, or give store=false",
            param="store",
            code="responses_full",
            rejection="overloaded",
        )

    async def _count(self, asked: ResponseAsked, num_bytes: int) -> None:
        await self.kept.add(asked.tenant, asked.created_s + self._retention_s, num_bytes)


class ResponseLog(ClaimedLog):
    """Writes the log of one response while no other gateway claims it.

    Attributes:
        stored: what the log said when it was claimed.
        num_counted: bytes that count for the API key so far.
    """

    def __init__(
        self,
        store: ResponseStore,
        response_id: str,
        instance: str,
        epoch: int,
        stored: StoredResponse,
    ) -> None:
        log, lease = store.keys.response(response_id), store.keys.response_lease(response_id)
        super().__init__(store.bus, response_id, log, lease, instance, epoch)
        self.stored = stored
        self.num_counted = 0
        self._store = store

    async def add(self, tokens: ResponseTokens) -> None:
        """Append tokens.

        Raises:
            StaleWriter: another gateway has claimed it, or ended it.
        """
        await self.append([encode(tokens)])
        self.stored.tokens += tokens.tokens.tolist()
        self.stored.logprobs += tokens.logprobs

    async def end(self, ended: ResponseEnded) -> None:
        """Write the end, in one entry with what reading it needs, in place of all entries.

        Raises:
            StaleWriter: another gateway has claimed it, or ended it.
        """
        stored = self.stored
        assert stored.asked is not None
        tokens = tokens_message(stored.tokens, stored.logprobs)
        messages = [encode(_slim(stored.asked)), encode(tokens), encode(ended)]
        await self.append(messages, replaces=True)
        await self._store.ended(self, sum(map(len, messages)))


def tokens_message(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ResponseTokens:
    """Tokens as they are kept."""
    return ResponseTokens(np.asarray(tokens, dtype=np.int32), tuple(logprobs))


def _slim(asked: ResponseAsked) -> ResponseAsked:
    """The same with no more than reading the answer needs."""
    submit: Submit = asked.submit
    sampling = replace(submit.sampling, grammar="")
    return replace(
        asked, submit=replace(submit, prompt=submit.prompt[-_PROMPT_END_TOKENS:], sampling=sampling)
    )
