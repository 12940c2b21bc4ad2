"""One client: what it has, and what must be true of that."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Protocol

from gateway.engine.event_queue import ClientDisconnected, EventQueue
from shared.messages.endings import FinishReason
from tests.simulation.deployment.clients import Call, Event, Outcome, Stream
from tests.simulation.deployment.model import Model
from tests.simulation.profile import WALL_S, Manner, Wish
from tests.support.fake_beams import searched

_RETRY_S = 0.1
_UNAVAILABLE_S = 1.0
_MAX_REFUSALS = 8
_DEADLINE = FinishReason.DEADLINE


class Door(Protocol):
    """A gateway as its clients see it."""

    def connect(self, stream: Stream) -> bool:
        """Open a connection; whether there is a process that takes it."""

    def serve(self, call: Callable[..., Call], stream: Stream, begin: str) -> None:
        """Have a call served."""

    def put(self, stream: Stream, event: ClientDisconnected) -> None:
        """The connection's other end has something to tell."""


class Client:
    """Wants one thing, and gets it from whichever gateway there is.

    Args:
        doors: gateways that can be connected to at this moment.
        may_be_lost: whether so much went wrong that a stream may end with an error.
        trace: takes what happens.
        is_served_instead: whether another client that asked for the same still is, or was.
        now_s: since the run began.

    Attributes:
        num_refusals: how often it was refused because too much is waiting.
        is_superseded: it has ended since another client was served instead.
        fault: what is wrong with what it got; "" as long as nothing is.
    """

    def __init__(
        self,
        wish: Wish,
        model: Model,
        rng: Random,
        doors: Callable[[], list[Door]],
        may_be_lost: Callable[["Client", Outcome, str], bool],
        trace: Callable[[str], None],
        is_slow: bool,
        is_served_instead: Callable[["Client"], bool],
        queue_ttl_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self.wish = wish
        self.fault = ""
        self.is_done = False
        self.has_moved = False
        self.num_errors = 0
        self.num_refusals = 0
        self.is_superseded = False
        self.tokens: list[list[int]] = []
        self.reasons: list[str] = []
        self._model = model
        self._rng = rng
        self._doors = doors
        self._may_be_lost = may_be_lost
        self._say = trace
        self._is_slow = is_slow
        self._is_served_instead = is_served_instead
        self._queue_ttl_s = queue_ttl_s
        self._now_s = now_s
        self._stream: Stream | None = None
        self._door: Door | None = None
        self._start_over()

    @property
    def request_id(self) -> str:
        return self.wish.submit.request_id

    @property
    def is_served(self) -> bool:
        """It has a connection right now."""
        return self._stream is not None and not self.is_done

    def move(self, num_kept: int | None = None) -> None:
        """Its connection breaks; it will try another."""
        if self._stream is None:
            return
        self._trace("its connection breaks")
        self._leave(num_kept, tells=self.wish.manner is Manner.REPEAT)

    async def run(self) -> None:
        """Until it has all it wants, or something is wrong."""
        await asyncio.sleep(self.wish.at_s)
        begin = "join" if self.wish.joins else "submit"
        while not self.is_done:
            doors = self._doors()
            stream = Stream(EventQueue())
            door = self._rng.choice(doors) if doors else None
            if door is None or not door.connect(stream):
                await asyncio.sleep(_RETRY_S)
                continue
            self._door, self._stream = door, stream
            self._trace(f"{begin} at {door}, has {[len(tokens) for tokens in self.tokens]}")
            door.serve(self._call, stream, begin)
            outcome, why = await self._follow(stream)
            self._stream = None
            begin = self._next(stream, outcome, why, begin)
            away = outcome in (Outcome.UNAVAILABLE, Outcome.TAKEN_OVER)
            await asyncio.sleep(self._rng.random() * (_UNAVAILABLE_S if away else _RETRY_S))

    def _call(self, engine: object, stream: Stream, begin: str) -> Call:
        submit = self.wish.submit
        stop_after = self.wish.after if self.wish.manner is Manner.STOP else None
        has = list(zip(map(list, self.tokens), self.reasons, strict=True))
        return Call(engine, stream, submit, stop_after, has if begin == "resume" else ())  # type: ignore[arg-type]

    def _next(self, stream: Stream, outcome: Outcome | None, why: str, begin: str) -> str:
        """How to try again, if at all."""
        if self.is_done:
            return begin
        if outcome is Outcome.DONE:
            self.is_done = True
            self._check_end()
        elif outcome is Outcome.TAKEN_OVER and self._is_served_instead(self):
            self.is_done = self.is_superseded = True
        elif outcome is Outcome.REFUSED:
            self._refused(why, begin)
        elif outcome in (Outcome.LOST, Outcome.FAILED):
            self.is_done = True
            self.num_errors += 1
            if not self._may_be_lost(self, outcome, why):
                self._wrong(f"ended with {outcome.name}: {why}")
        self.has_moved = True
        if self.wish.manner is Manner.REPEAT:
            self._start_over()
            return "join"
        return "resume" if stream.is_accepted or begin == "resume" else "join"

    def _refused(self, why: str, begin: str) -> None:
        """What was never accepted may be refused, and asked for again."""
        self.num_refusals += 1
        if not self._may_be_lost(self, Outcome.REFUSED, why) or begin == "resume":
            self._wrong(f"refused at {begin}: {why}")
        self.is_done = self.is_done or self.num_refusals == _MAX_REFUSALS

    async def _follow(self, stream: Stream) -> tuple[Outcome | None, str]:
        """Read until the stream ends, or breaks."""
        while True:
            if self._is_slow:
                await asyncio.sleep(self._rng.random() * 0.05)
            if not stream.events:
                if stream.is_broken:
                    return None, ""
                stream.arrived.clear()
                await stream.arrived.wait()
                continue
            event = stream.events.pop(0)
            if event.outcome is not None:
                self._trace(f"{event.outcome.name} {event.why}")
                return event.outcome, event.why
            self._receive(event)
            if self.is_done or self._has_enough():
                self._leave(None, tells=True)
                self.is_done = True
                return None, ""

    def _has_enough(self) -> bool:
        total = sum(map(len, self.tokens))
        return self.wish.manner is Manner.ABORT and total >= self.wish.after

    def _leave(self, num_kept: int | None, tells: bool) -> None:
        stream, self._stream = self._stream, None
        if stream is None or self._door is None:
            return  # it was broken off before
        stream.break_off(num_kept)
        if tells:
            self._door.put(stream, ClientDisconnected())

    def _start_over(self) -> None:
        self.tokens = [[] for _ in range(self.wish.submit.num_choices)]
        self.reasons = [""] * self.wish.submit.num_choices

    # ------------------------------------------------------------------ checks

    def _receive(self, event: Event) -> None:
        tokens, choice = self.tokens[event.choice], event.choice
        prompt = self.wish.submit.prompt.tolist()
        self._trace(f"choice {choice}: {list(event.tokens)} {event.finish_reason}")
        if self.wish.submit.sampling.num_logprobs is not None:
            expected = [self._model.logprob(token) for token in event.tokens]
            if list(event.scores) != expected:
                self._wrong(f"choice {choice} has log-probabilities {event.scores}, not {expected}")
        if event.tokens and self.reasons[choice]:
            self._wrong(f"choice {choice} goes on after its end")
        for token in event.tokens:
            if self.wish.submit.sampling.beams is None:
                before = self._model.drawn_after(token)
                if before != (*prompt, *tokens):
                    self._wrong(f"choice {choice} has {tokens}, {token} was drawn after {before}")
            tokens.append(token)
        if event.finish_reason:
            if self.reasons[choice]:
                self._wrong(f"choice {choice} ends twice")
            self.reasons[choice] = event.finish_reason
            if self.wish.submit.sampling.beams is None or event.finish_reason == _DEADLINE:
                self._check_reason(choice)

    def _check_reason(self, choice: int) -> None:
        tokens, reason = self.tokens[choice], self.reasons[choice]
        if reason == FinishReason.LENGTH:
            fits = len(tokens) == self.wish.submit.sampling.max_tokens
        elif reason == FinishReason.STOP:
            fits = bool(tokens) and self._model.ends(tokens[-1])
        elif reason == FinishReason.DEADLINE:
            fits = self._is_late()
        else:
            fits = reason == "stop string" and len(tokens) == self.wish.after
        if not fits:
            self._wrong(f"choice {choice} ends with {reason!r} after {len(tokens)} tokens")

    def _is_late(self) -> bool:
        """Its time is over, or it has waited too long without anything."""
        submit, now_ms = self.wish.submit, 1000 * (WALL_S + self._now_s())
        if 0 < submit.deadline_ms <= now_ms:
            return True
        ttl_ms = 1000 * self._queue_ttl_s
        return 0 < ttl_ms <= now_ms - submit.received_ms and not any(self.tokens)

    def _check_end(self) -> None:
        if not all(self.reasons):
            self._wrong(f"done, but its choices ended with {self.reasons}")
        submit = self.wish.submit
        beams = submit.sampling.beams
        if beams is not None and not self.fault and _DEADLINE not in self.reasons:
            found = searched(tuple(submit.prompt.tolist()), submit.sampling.max_tokens, beams)
            if self.tokens != [list(tokens) for tokens, _ in found]:
                self._wrong(f"the beam search found {self.tokens}, not {found}")

    def _wrong(self, fault: str) -> None:
        self.fault = self.fault or f"{self.request_id}: {fault}"
        self.is_done = True

    def _trace(self, text: str) -> None:
        self._say(f"client of {self.request_id}: {text}")
