"""The engines that have one model behind the methods of one: routes requests, and moves them."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from gateway.engine.engine_status import Engine, EngineAway
from gateway.engine.event_queue import EventQueue, ServerStopping
from gateway.engine.events import EngineUnreachable, Superseded, UnknownRequest
from gateway.fleet.directory import Directory
from gateway.fleet.members import Connect, MakeClient, Member, Members
from gateway.fleet.placements import NoEngine, Placements
from gateway.fleet.router import Router
from gateway.fleet.routing import Reason
from gateway.pins.pin_requests import Pinning, Prefix
from shared.bus.api import Bus
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.endings import FinishReason
from shared.messages.leases import EngineInfo
from shared.messages.requests import ChoiceView, Stop, Submit
from shared.metrics import ModelMetrics
from shared.tasks import cancel_until_done

_log = EventLog("gateway.fleet")

_RETRY_S = 0.25


class Fleet:
    """Implements ``Engines`` for the engines of a directory that have one model.

    Args:
        directory: of the fleet.
        connect: makes the bus to an engine's Redis.
        make_client: makes an engine's client.
        patience_s: how long a request waits for an engine that goes on with it.
        engine_patience_s: without a lease for so long, an engine is lost.
        retention_s: without a lease and without requests for so long, it is dropped.
        prefixes: those that engines are to keep in their pools.
        resume_window_s: how long a stream without a reader goes on.
    """

    def __init__(
        self,
        directory: Directory,
        model_name: str,
        metrics: ModelMetrics,
        connect: Connect,
        make_client: MakeClient,
        patience_s: float = 30.0,
        engine_patience_s: float = 10.0,
        retention_s: float = 300.0,
        prefixes: Sequence[Prefix] = (),
        resume_window_s: float = 60.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._model_name = model_name
        self._metrics = metrics
        self._patience_s = patience_s
        self._engine_patience_s = engine_patience_s
        self._retention_s = retention_s
        self._prefixes = prefixes
        self._clock_s = clock_s
        self._members = Members(connect, make_client, self._released)
        self._router = Router(metrics, directory.routes(model_name))
        self._placements = Placements(
            *(directory, self._members, self._router, patience_s, engine_patience_s),
            *(resume_window_s, clock_s),
        )
        self._engine_of: dict[str, str] = {}  # of open requests
        self._between: dict[str, EventQueue] = {}  # requests that no engine has now
        self._tasks: set[asyncio.Task[None]] = set()
        self._directory_error: str | None = None
        self._memory_share = 0.0
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ state

    @property
    def status(self) -> Engine | EngineAway:
        """The engine with the largest pool: what it cannot take, none can."""
        engines = [member.engine for member in self._members.ready()]
        found = [engine for engine in engines if engine is not None]
        if found:
            return max(found, key=lambda engine: engine.pool_tokens)
        for member in self._members.by_id.values():
            if isinstance(status := member.client.status, EngineAway):
                return EngineAway(status.detail)
        nothing = f"no engine of the fleet serves {self._model_name!r}"
        return EngineAway(self._directory_error or nothing)

    @property
    def num_engines(self) -> int:
        """Engines that can take requests."""
        return len(self._members.ready())

    @property
    def seen_s(self) -> dict[str, float]:
        """When the lease of each engine was read last that has this model, or had it lately."""
        return {name: member.seen_s for name, member in self._members.by_id.items()}

    @property
    def pinning(self) -> Pinning:
        """That of a ready engine."""
        ready = self._members.ready()
        return ready[0].client.pinning if ready else Pinning(self._prefixes)

    @property
    def logs(self) -> dict[str, Bus]:
        """Where the logs of each engine are."""
        return {engine_id: member.bus for engine_id, member in self._members.by_id.items()}

    @property
    def is_positioned(self) -> bool:
        """The log of at least one engine was read."""
        return any(member.client.is_positioned for member in self._members.by_id.values())

    @property
    def is_full(self) -> bool:
        """Every engine would refuse a new request."""
        ready = self._members.ready()
        return bool(ready) and all(member.client.is_full for member in ready)

    @property
    def is_short_of_memory(self) -> bool:
        """No engine's Redis has memory for new requests."""
        ready = self._members.ready()
        return bool(ready) and all(member.client.is_short_of_memory for member in ready)

    @property
    def num_open(self) -> int:
        """The number of requests that calls wait for."""
        return len(self._between) + sum(m.client.num_open for m in self._members.by_id.values())

    @property
    def log_lag_s(self) -> float:
        """The longest since the log of an engine was read to its end."""
        return max((m.client.log_lag_s for m in self._members.ready()), default=0.0)

    def submit_of(self, request_id: str) -> Submit | None:
        """What a call of this process asked for that is still open."""
        member = self._member_of(request_id)
        return None if member is None else member.client.submit_of(request_id)

    def route_of(self, request_id: str) -> str:
        """The engine of an open request and the reason, for a header; empty if not known."""
        return self._router.route_of(request_id)

    # --------------------------------------------------------------- requests

    async def submit(self, submits: Sequence[Submit], queue: EventQueue) -> None:
        """Submit the requests of a call to one engine."""
        member = self._router.route(submits[0], self._members.ready())
        if member is None:
            for submit in submits:
                queue.put(EngineUnreachable(submit.request_id, "no engine of the fleet is ready"))
            return
        ids = [submit.request_id for submit in submits]
        for request_id in ids:
            self._engine_of[request_id] = member.engine_id
        try:
            await self._directory.place(ids, member.engine_id)
            await self._placements.keep(submits, self._memory_share)
        except BusUnavailable as error:
            _log.warning("not placed", ids=ids, error=error)  # a move places them
        await member.client.submit(submits, queue)

    def attach(
        self, submit: Submit, queue: EventQueue, views: Sequence[ChoiceView] | None = None
    ) -> None:
        """Deliver a request that an engine may have, from there on."""
        self._enter(submit.request_id, queue)
        self._start(self._attach(submit, queue, views))

    def look_up(self, request_id: str, queue: EventQueue) -> None:
        """Ask for a request by its id."""
        self._enter(request_id, queue)
        self._start(self._look_up(request_id, queue))

    def stop(self, stop: Stop, queue: EventQueue) -> None:
        """Send a Stop of a choice."""
        if (member := self._member_of(stop.request_id)) is not None:
            member.client.stop(stop, queue)

    def abort(self, request_id: str, queue: EventQueue, reason: str) -> None:
        """Abort the request, unless another call waits for it."""
        if (member := self._closing(request_id, queue, keep_s=0.0)) is not None:
            member.client.abort(request_id, queue, reason)

    def abandon(self, request_id: str, queue: EventQueue, after_s: float) -> None:
        """End the call's wait, and abort the request later unless another call comes."""
        if (member := self._closing(request_id, queue, keep_s=after_s)) is not None:
            member.client.abandon(request_id, queue, after_s)

    def close(self, request_id: str, queue: EventQueue) -> None:
        """End the call's wait without an Abort."""
        if (member := self._closing(request_id, queue)) is not None:
            member.client.close(request_id, queue)

    def close_choice(
        self, request_id: str, index: int, num_tokens: int, reason: FinishReason, queue: EventQueue
    ) -> None:
        """End one choice of a request; others may go on."""
        if (member := self._member_of(request_id)) is not None:
            member.client.close_choice(request_id, index, num_tokens, reason, queue)

    def leave(self) -> None:
        """Tell every call that this process stops."""
        for queue in self._between.values():
            queue.put(ServerStopping())
        for member in self._members.by_id.values():
            member.client.leave()

    async def all_closed(self) -> None:
        """Return when no request is open."""
        while self.num_open:
            self._changed.clear()
            await self._changed.wait()

    async def flushed(self) -> None:
        """Return when all that was sent has been appended."""
        await asyncio.gather(*(m.client.flushed() for m in self._members.ready()))

    # ----------------------------------------------------------------- leases

    async def renew(self, memory_share: float) -> None:
        """Keep open requests in the directory for longer; raises BusUnavailable."""
        self._memory_share = memory_share
        await self._placements.renew()

    async def update(self, leases: Mapping[str, EngineInfo]) -> None:
        """Take the leases of the directory: those of engines with this model, or none yet."""
        self._directory_error = None
        now_s = self._clock_s()
        self._members.update(leases, now_s)
        self._router.update(self._members.ready())
        for member in self._members.by_id.values():
            if member.task.done():
                member.task.result()  # the reader of a log failed, and with it the gateway
        for member in self._members.silent(now_s, self._engine_patience_s):
            for request_id in member.client.open_ids():
                self._start(self._move(request_id, member.engine_id, is_lost=True))
            if not member.client.num_open and now_s - member.seen_s >= self._retention_s:
                await self._members.drop(member)
        self._changed.set()

    def directory_failed(self, why: str) -> None:
        """The directory was not read: leases expire meanwhile, and no engine is lost by that."""
        self._directory_error = why
        now_s = self._clock_s()
        for member in self._members.by_id.values():
            member.seen_s = now_s

    async def end(self) -> None:
        """Stop moving requests and reading logs."""
        for task in list(self._tasks):
            await cancel_until_done(task)
        await self._router.end()
        await self._members.close()

    # ----------------------------------------------- requests of known placement

    async def _attach(
        self, submit: Submit, queue: EventQueue, views: Sequence[ChoiceView] | None
    ) -> None:
        request_id = submit.request_id
        while self._is_between(request_id, queue):
            try:
                old = await self._directory.find(request_id)
                member = None if old is None else self._members.by_id.get(old.engine_id)
                if member is None:
                    reason = None if old is None else Reason.MOVED
                    member = self._router.route(submit, self._members.ready(), reason)
                    if member is None or not await self._directory.move(
                        request_id, old, member.engine_id
                    ):
                        await asyncio.sleep(_RETRY_S)
                        continue
                await self._placements.keep([submit], self._memory_share)
            except (BusUnavailable, DecodeError) as error:
                self._fail(request_id, queue, f"the directory does not answer: {error}")
                return
            if self._arrive(request_id, queue, member):
                member.client.attach(submit, queue, views)

    async def _look_up(self, request_id: str, queue: EventQueue, released_by: str = "") -> None:
        is_waited_for = partial(self._is_between, request_id, queue)
        try:
            found = await self._placements.locate(request_id, is_waited_for, released_by)
        except (BusUnavailable, DecodeError, NoEngine) as error:
            self._fail(request_id, queue, f"no engine goes on with it: {error}")
            return
        if found is None:
            if is_waited_for():
                del self._between[request_id]
                queue.put(UnknownRequest(request_id))
        elif self._arrive(request_id, queue, found.member):
            found.member.client.look_up(request_id, queue, found.submit)
            if found.submit is not None:
                self._metrics.moved_requests["released" if released_by else "lost"].inc()

    # ------------------------------------------------------------------ moves

    def _released(self, engine_id: str, request_id: str) -> None:
        self._start(self._move(request_id, engine_id, is_lost=False))

    async def _move(self, request_id: str, source: str, is_lost: bool) -> None:
        """Let another engine go on with a request, from the tokens that its client has."""
        member = self._members.by_id.get(source)
        taken = None if member is None else member.client.take_away(request_id, abort=is_lost)
        if taken is None:
            return  # its call has ended
        self._engine_of.pop(request_id, None)
        self._between[request_id] = taken.queue
        if taken.submit is None:
            await self._look_up(request_id, taken.queue, "" if is_lost else source)
            return
        until_s = self._clock_s() + self._patience_s
        while self._is_between(request_id, taken.queue):
            try:
                target = await self._placements.new_place(taken.submit, source)
            except (BusUnavailable, DecodeError) as error:
                _log.warning("cannot move", request=request_id, error=error)
                target = None
            if target is None:
                if self._clock_s() >= until_s:
                    why = "its engine ended, and no other could go on with it"
                    self._fail(request_id, taken.queue, why)
                    return
                await asyncio.sleep(_RETRY_S)
            elif self._arrive(request_id, taken.queue, target):
                views = taken.views if taken.accepted else None
                target.client.attach(taken.submit, taken.queue, views)
                count = sum(len(view.tokens) for view in taken.views)
                facts = {"source": source, "engine": target.engine_id, "generated_tokens": count}
                _log.info("moved", request=request_id, **facts)
                self._metrics.moved_requests["lost" if is_lost else "released"].inc()

    # ---------------------------------------------------------------- helpers

    def _enter(self, request_id: str, queue: EventQueue) -> None:
        """A call waits for a request whose engine is looked for; the newer of two calls wins."""
        earlier = self._between.get(request_id)
        if earlier is not None:
            earlier.put(Superseded(request_id))
        self._between[request_id] = queue

    def _is_between(self, request_id: str, queue: EventQueue) -> bool:
        return self._between.get(request_id) is queue

    def _arrive(self, request_id: str, queue: EventQueue, member: Member) -> bool:
        """A request is at an engine; False if its call has ended meanwhile."""
        if not self._is_between(request_id, queue):
            return False
        del self._between[request_id]
        self._engine_of[request_id] = member.engine_id
        return True

    def _member_of(self, request_id: str) -> Member | None:
        return self._members.by_id.get(self._engine_of.get(request_id, ""))

    def _closing(
        self, request_id: str, queue: EventQueue, keep_s: float | None = None
    ) -> Member | None:
        """The engine of a request whose call ends; the directory keeps it for ``keep_s``."""
        if self._is_between(request_id, queue):
            del self._between[request_id]
        member = self._member_of(request_id)
        if member is None or member.client.is_open(request_id, queue):
            self._engine_of.pop(request_id, None)
            self._router.forget(request_id)
            self._placements.closed(request_id)
            if keep_s is not None:
                self._start(self._placements.expire(request_id, keep_s))
        self._changed.set()
        return member

    def _fail(self, request_id: str, queue: EventQueue, why: str) -> None:
        if self._is_between(request_id, queue):
            del self._between[request_id]
            queue.put(EngineUnreachable(request_id, why))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request was lost between engines", error=error)
