"""The gateway's side of one engine: submits requests and reads what becomes of them."""

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.engine.backoff import Backoff
from gateway.engine.deliveries import Deliveries, TakenAway
from gateway.engine.engine_status import Engine, EngineAway, status_of
from gateway.engine.event_queue import EventQueue, ServerStopping
from gateway.engine.outbox import Outbox
from gateway.engine.outputs_follower import OutputsFollower
from gateway.engine.stored_prompts import read_prompt
from gateway.pins.pin_requests import Pinning, Prefix
from gateway.tracing.phases import PhaseTracker
from shared.bus.api import START, Append, Bus, Entry, EntryId
from shared.bus.ends import LogEnds
from shared.bus.keys import EngineKeys
from shared.codec import encode
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.endings import FinishReason
from shared.messages.leases import EngineInfo, decode_lease
from shared.messages.requests import Abort, ChoiceView, Stop, Submit
from shared.metrics import ModelMetrics
from shared.tasks import run_together

_log = EventLog("gateway.engine.client")

_BLOCK_MS = 1_000
_MAX_ENTRIES = 512
_POLL_S = 0.5
_POLL_AWAY_S = 0.1  # while there is no engine
_LEASE_MS = 10_000
_RENEW_S = 2.0
_FULL_SHARE = 0.8  # of Redis' memory


class EngineClient:
    """One reader of the outputs log for all requests of this process.

    Args:
        model_name: the model that this gateway serves; an engine with another is of no use.
        instance: names this gateway in the log.
        prefixes: those that the engine is to keep in its pool.
        patience_s: how long the bus may be away, and how long calls wait for the engine's first
            answer, before they fail.
        phases: follows the requests of traces; None: no traces are recorded.
        on_released: takes the id of a request that the engine hands over to others.
    """

    def __init__(
        self,
        bus: Bus,
        engine_id: str,
        model_name: str,
        instance: str,
        metrics: ModelMetrics,
        prefixes: Sequence[Prefix] = (),
        patience_s: float = 30.0,
        phases: PhaseTracker | None = None,
        on_released: Callable[[str], None] | None = None,
    ) -> None:
        self.instance = instance
        self.patience_s = patience_s
        self.pinning = Pinning(prefixes)
        self._bus = bus
        self._keys = EngineKeys(engine_id)
        self._model_name = model_name
        self._metrics = metrics
        self._follower = OutputsFollower(phases)
        self._outbox = Outbox(bus, self._keys.requests, self._trim_below)
        self._deliveries = Deliveries(
            instance, self._follower.requests, self._outbox.send, _loop_s, phases, on_released
        )
        self._renew_s = 0.0
        self._away_since_s: float | None = None
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._run_id: str | None = None
        self._must_find_position = True
        self._ends = LogEnds(bus)
        self._past = START  # entries up to here are of a time before this process
        self._positioned = asyncio.Event()
        self._status: Engine | EngineAway = EngineAway("the engine was not looked for yet")
        self._last_read_s = time.monotonic()
        self._memory_share = 0.0

    @property
    def logs(self) -> dict[str, Bus]:
        """Where the engine's logs are."""
        return {self._keys.engine_id: self._bus}

    @property
    def is_short_of_memory(self) -> bool:
        """What Redis has left is for finishing what was accepted."""
        return self._memory_share > _FULL_SHARE

    @property
    def memory_share(self) -> float:
        """Share of Redis' memory limit that is in use; 0.0 if it has none."""
        return self._memory_share

    @property
    def status(self) -> Engine | EngineAway:
        """The engine as it was polled last.

        Polls are half a second apart. While Redis accepts commands and does not answer, a poll
        lasts until they time out, some ten seconds at most, and this is the result before it.
        """
        if not self._positioned.is_set() and isinstance(self._status, Engine):
            return EngineAway("the log of outputs was not found yet")
        return self._status

    @property
    def num_engines(self) -> int:
        """One, if it can take requests."""
        return int(isinstance(self.status, Engine))

    async def run(self) -> None:
        """Read, poll and append until cancelled."""
        await run_together(self._read_outputs(), self._poll_status(), self._outbox.run())

    @property
    def is_positioned(self) -> bool:
        """The log of outputs can be read, so that attaching to a request can work."""
        return self._positioned.is_set()

    async def submit(self, submits: Sequence[Submit], queue: EventQueue) -> None:
        """Append requests, all or none; their events will arrive in ``queue``.

        If it is unknown whether they were, they are attached to, and an Attached of each follows if
        the engine has it or takes it now. An EngineUnreachable comes if the engine does not answer.
        """
        for submit in submits:
            self._deliveries.open(submit, queue, patience_s=self.patience_s)
        self._none_open.clear()
        append = Append(
            self._keys.requests,
            [encode(submit) for submit in submits],
            trim_below=self._trim_below(),
        )
        try:
            await self._bus.append(append)
        except BusUnavailable as error:
            _log.warning(
                "cannot submit", ids=[submit.request_id for submit in submits], error=error
            )
            for submit in submits:
                self._deliveries.attach_unanswered(submit.request_id, queue)

    def attach(
        self, submit: Submit, queue: EventQueue, views: Sequence[ChoiceView] | None = None
    ) -> None:
        """Deliver a request that may be known to the engine from here on.

        An Attached follows if that works, an EngineUnreachable if the engine does not answer.

        Args:
            views: by choice, what the client has, empty for nothing at all; None if it is
                not known whether the engine has the request.
        """
        self._deliveries.open(
            submit, queue, views or (), accepted=views is not None, patience_s=self.patience_s
        )
        self._none_open.clear()
        self._deliveries.attach(submit.request_id)

    def look_up(self, request_id: str, queue: EventQueue, lost: Submit | None = None) -> None:
        """Ask for a request by its id: Attached, UnknownRequest or EngineUnreachable will come.

        Args:
            lost: the request, if it was another engine's, which is lost.
        """
        self._deliveries.look_up(request_id, queue, self.patience_s, lost)
        self._none_open.clear()

    def open_ids(self) -> list[str]:
        """Ids of the requests that calls wait for."""
        return self._deliveries.ids()

    def take_away(self, request_id: str, abort: bool) -> TakenAway | None:
        """End the delivery of a request, which goes on in another engine.

        Args:
            abort: leave an Abort in the log, so that the engine does not go on if it comes back.
        """
        taken = self._deliveries.take_away(request_id)
        if taken is not None and taken.submit is not None and abort:
            self._outbox.send(Abort(request_id, taken.attachment, "it was moved"))
        if not self._deliveries:
            self._none_open.set()
        return taken

    @property
    def is_full(self) -> bool:
        """Whether a new request would be refused: one just was, for lack of room."""
        return self._deliveries.is_full

    def submit_of(self, request_id: str) -> Submit | None:
        """What a call of this process asked for that is still open."""
        return self._deliveries.submit_of(request_id)

    def is_open(self, request_id: str, queue: EventQueue) -> bool:
        """Whether this call still waits for this request."""
        return self._deliveries.is_open(request_id, queue)

    def route_of(self, request_id: str) -> str:  # noqa: ARG002
        """Empty: there is one engine."""
        return ""

    def stop(self, stop: Stop, queue: EventQueue) -> None:
        """Send a Stop of a choice, unless another call delivers the request."""
        if self._deliveries.is_open(stop.request_id, queue):
            self._outbox.send(stop)

    def abort(self, request_id: str, queue: EventQueue, reason: str) -> None:
        """Abort the request, unless another call waits for it."""
        attachment = self._closed(request_id, queue)
        if attachment:
            self._outbox.send(Abort(request_id, attachment, reason))

    def abandon(self, request_id: str, queue: EventQueue, after_s: float) -> None:
        """End the call's wait, and abort the request later unless another call comes."""
        attachment = self._closed(request_id, queue)
        if attachment:
            abort = Abort(request_id, attachment, "its client did not come back")
            asyncio.get_running_loop().call_later(after_s, self._outbox.send, abort)

    def close(self, request_id: str, queue: EventQueue) -> None:
        """End the call's wait without an Abort."""
        self._closed(request_id, queue)

    def close_choice(
        self, request_id: str, index: int, num_tokens: int, reason: FinishReason, queue: EventQueue
    ) -> None:
        """End one choice of a request; others may go on."""
        if self._deliveries.is_open(request_id, queue):
            self._follower.requests.close_choice(request_id, index, num_tokens, reason)

    def _closed(self, request_id: str, queue: EventQueue) -> str | None:
        attachment = self._deliveries.close(request_id, queue)
        if not self._deliveries:
            self._none_open.set()
        return attachment

    def leave(self) -> None:
        """Put a ServerStopping into the queue of every call."""
        for queue in self._deliveries.queues():
            queue.put(ServerStopping())

    @property
    def num_open(self) -> int:
        """The number of requests that calls wait for."""
        return len(self._deliveries)

    @property
    def log_lag_s(self) -> float:
        """Seconds since the log was last read to its end, 0 without open requests."""
        return time.monotonic() - self._last_read_s if self._deliveries else 0.0

    async def all_closed(self) -> None:
        """Return when no request is open."""
        await self._none_open.wait()

    async def flushed(self) -> None:
        """Return when all that was sent has been appended."""
        await self._outbox.flushed()

    def _trim_below(self) -> EntryId | None:
        """Up to where requests may be trimmed.

        After a failure the server may be another one whose clock went back, and what is new there
        lies below the cursor. What could not be sent before is sent again just then.
        """
        if self._must_find_position or self._away_since_s is not None:
            return None
        return self._follower.requests_cursor

    async def _read_outputs(self) -> None:
        backoff = Backoff()
        while True:
            try:
                if self._must_find_position:
                    await self._find_position()
                await self._renew_lease()
                cursors = {self._keys.outputs: self._follower.cursor}
                found = await self._bus.read(cursors, _BLOCK_MS, _MAX_ENTRIES)
                backoff.reset()
                self._away_since_s = None
                self._apply(found.get(self._keys.outputs, ()))
                await self._read_prompts()
            except BusUnavailable as error:
                self._must_find_position = True
                if self._away_since_s is None:
                    self._away_since_s = _loop_s()
                _log.warning("cannot read outputs", error=error)
                await backoff.wait()

    def _apply(self, entries: Sequence[Entry]) -> None:
        if len(entries) < _MAX_ENTRIES:
            self._last_read_s = time.monotonic()
        self._metrics.outputs_lag_entries.set(len(entries))
        for entry in entries:
            self._deliveries.dispatch(self._follower.apply(entry))
        self._update_positioned()

    async def _read_prompts(self) -> None:
        """Read the prompts of requests that are taken over by their ids."""
        for state in self._deliveries.take_referring():
            found = await read_prompt(self._bus, self._keys.prompts, state)
            if found is None:
                self._deliveries.prompt_not_found(state.submit.request_id)
            else:
                self._deliveries.dispatch(self._follower.found(found))

    async def _renew_lease(self) -> None:
        """Renew the gateway's lease, from the loop that reads the log: health is progress."""
        if _loop_s() >= self._renew_s:
            await self._bus.put(self._keys.gateway(self.instance), b"1", _LEASE_MS)
            self._renew_s = _loop_s() + _RENEW_S

    async def _find_position(self) -> None:
        """Find the position in the log: at start, and where its end may be lost.

        At start all of it is read, although no request is open yet: without the number of the
        last step a later gap could not be noticed.
        """
        self._must_find_position = False
        run_id = await self._bus.run_id()
        last = await self._bus.last_id(self._keys.outputs)
        if run_id == self._run_id and last >= self._follower.cursor:
            return
        if self._run_id is not None:
            is_same = run_id == self._run_id
            why = "outputs was deleted" if is_same else "Redis was restarted or replaced"
            _log.warning(why, last=last, cursor=self._follower.cursor)
            self._renew_s = 0.0
            follower = self._follower
            lost = follower.log_deleted() if is_same else follower.server_restarted(last)
            self._deliveries.dispatch(lost)
            self._deliveries.server_restarted()
        self._run_id, self._past = run_id, last
        self._update_positioned()

    def _update_positioned(self) -> None:
        if self._follower.cursor >= self._past:
            self._positioned.set()

    async def _poll_status(self) -> None:
        while True:
            status = await self._look()
            if status != self._status:
                detail = status.detail if isinstance(status, EngineAway) else "ready"
                _log.info("engine", status=detail)
            self._status = status
            self._metrics.outputs_lag_seconds.set(self.log_lag_s)
            self._tend_deliveries()
            await asyncio.sleep(_POLL_S if isinstance(self.status, Engine) else _POLL_AWAY_S)

    def _tend_deliveries(self) -> None:
        # Without a scheduler nothing can be answered; the one that comes reads what was appended.
        if not self._outbox.is_behind and isinstance(self._status, Engine):
            self._deliveries.repeat()
            self._deliveries.attach_where_states_lack()
        self._deliveries.give_up(f"the engine did not answer within {self.patience_s:g} s")
        if isinstance(self._status, EngineAway) and self._status.is_final:
            self._deliveries.give_all_up(self._status.detail)
        away_since_s = self._away_since_s
        if away_since_s is not None and _loop_s() - away_since_s >= self.patience_s:
            self._deliveries.give_all_up(f"Redis has been away for {self.patience_s:g} s")

    async def _look(self) -> Engine | EngineAway:
        try:
            # A connection can be renewed without an error that the reader would see.
            if self._run_id is not None and await self._is_elsewhere(self._run_id):
                self._must_find_position = True
            self._memory_share = await self._bus.memory_share()
            data = await self._bus.get(self._keys.info)
            info = None if data is None else decode_lease(EngineInfo, data, "scheduler")
        except (BusUnavailable, DecodeError) as error:
            return EngineAway(str(error))
        status = status_of(info, self._keys.engine_id, self._model_name)
        if info is not None and isinstance(status, Engine):
            for pin in self.pinning.due(info, _loop_s()):
                self._outbox.send(pin)
        return status

    async def _is_elsewhere(self, run_id: str) -> bool:
        """The log that was read so far is not the one that is there, or has lost its end."""
        if await self._bus.run_id() != run_id:
            return True
        return await self._ends.lost({self._keys.outputs: self._follower.cursor}) is not None


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
