"""A client that gets one answer, across failures of the services."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.http_stream import Broken, Response, ask
from tests.chaos.workload import Ask

_RETRY_S = 0.1
_DONE = "[DONE]"


class Refused(Exception):
    """An answer that a repeated request would not improve."""


@dataclass(slots=True)
class Choice:
    """The tokens received of one choice."""

    text: str = ""
    calls: str = ""  # of tools: their names and arguments
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def plain(self) -> tuple[str, str, tuple[int, ...], str | None]:
        """The choice as plain data, for comparison."""
        return self.text, self.calls, tuple(self.tokens), self.finish_reason


@dataclass(slots=True)
class Outcome:
    """The result of a request.

    Attributes:
        arrivals_s: when tokens arrived, from the monotonic clock; the first entry is when it was
            sent.
        num_duplicates: tokens in events that were already received.
        num_gaps: tokens that an event counts as sent, and that were not received.
        num_resumed: connections after the first that had events.
        why: reason of its end, unless it is complete.
        problems: problems on the way.
    """

    ask: Ask
    choices: list[Choice]
    arrivals_s: list[float]
    request_id: str = ""
    num_duplicates: int = 0
    num_gaps: int = 0
    num_resumed: int = 0
    why: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has arrived."""
        return self.why is None and all(choice.finish_reason for choice in self.choices)


class Client:
    """Gets one answer.

    Args:
        run: distinguishes this run from others, in the idempotency key.
        ports: of all gateways.
        resumes: whether it requests a stream that can be resumed; otherwise it keeps its first one
            or fails, as OpenAI's clients do.
        first: the gateway to begin with.
        deadline_s: how long the answer may take.
        patience_s: longest silence of a stream that can be resumed.
        headers: of every request, for example with an API key.
    """

    def __init__(
        self,
        what: Ask,
        run: str,
        ports: Sequence[int],
        resumes: bool,
        first: int,
        deadline_s: float,
        patience_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._ask = what
        self._key = f"{run}-{what.key}"
        self._ports = ports
        self._resumes = resumes
        self._turn = first
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._headers = dict(headers or {})
        self._url: str | None = None
        self._last_id = ""
        self._ended = False
        choices = [Choice() for _ in range(what.num_choices)]
        self.outcome = Outcome(what, choices, [time.monotonic()])

    async def run(self) -> Outcome:
        """Request until the answer is complete, or has failed for good."""
        outcome = self.outcome
        try:
            async with asyncio.timeout(self._deadline_s):
                while not self._ended:
                    await self._try()
        except TimeoutError:
            outcome.why = f"not complete after {self._deadline_s:g} s"
        except Refused as refused:
            outcome.why = str(refused)
        if outcome.why is None and not outcome.is_complete:
            outcome.why = "[DONE] came before the end of every choice"
        return outcome

    async def _try(self) -> None:
        """Use one connection."""
        port = self._ports[self._turn % len(self._ports)]
        before = len(self.outcome.arrivals_s)
        try:
            async with self._open(port) as response:
                await self._take(response)
        except Broken as broken:
            self._record_problem(f"port {port}: {broken}")
        except TimeoutError:
            if not self._resumes:
                raise
            self._record_problem(f"port {port}: silent for {self._patience_s:g} s")
        if self._ended:
            return
        begun = len(self.outcome.arrivals_s) > 1
        if begun and not self._resumes:
            raise Refused("the stream ended without [DONE], and cannot be resumed")
        if len(self.outcome.arrivals_s) > before:
            self.outcome.num_resumed += 1
        self._turn += 1
        await asyncio.sleep(_RETRY_S)

    def _open(self, port: int) -> Any:
        if self._url is not None:
            last = {"Last-Event-ID": self._last_id} if self._last_id else {}
            return ask(port, self._url, headers=self._headers | last)
        if not self._resumes:
            return ask(port, self._ask.path, self._ask.body, self._headers)
        body = self._ask.body | {"stream_resume": True}
        return ask(port, self._ask.path, body, self._headers | {"Idempotency-Key": self._key})

    async def _take(self, response: Response) -> None:
        if self._url is None:  # a client that resumes a stream gets another id for it
            self.outcome.request_id = response.headers.get("x-request-id", "")
        if response.status == 503:
            self._record_problem(f"503: {(await response.body())[:200].decode(errors='replace')}")
            return
        if response.status != 200:
            body = (await response.body())[:300].decode(errors="replace")
            raise Refused(f"status {response.status}: {body}")
        self._url = response.headers.get("x-stream-url", self._url)
        chunks = response.chunks()
        rest = b""
        while True:
            # A plain stream may be silent for any time.
            async with asyncio.timeout(self._patience_s if self._resumes else None):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                self._event(event.decode())

    def _event(self, text: str) -> None:
        fields = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line)
        data = fields.get("data", "")
        if data == _DONE:
            self._ended = True
            return
        shown = json.loads(data)
        if "error" in shown:
            raise Refused(f"error event: {shown['error'].get('message')}")
        for part in shown["choices"]:
            self._part(part, fields.get("id"))

    def _part(self, part: dict[str, Any], event_id: str | None) -> None:
        choice, tokens = self.outcome.choices[part["index"]], part.get("token_ids") or []
        if choice.finish_reason is not None:
            self.outcome.num_duplicates += max(1, len(tokens))
        delta = part.get("delta", {})
        choice.text += part.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            begins = f"\n{call['index']} {function['name']} " if "name" in function else ""
            choice.calls += begins + function["arguments"]
        choice.tokens += tokens
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
        if tokens:
            self.outcome.arrivals_s.append(time.monotonic())
        if event_id is not None:
            self._last_id = event_id
            excess = len(choice.tokens) - _position(event_id, part["index"])
            self.outcome.num_duplicates += max(0, excess)
            self.outcome.num_gaps += max(0, -excess)

    def _record_problem(self, what: str) -> None:
        self.outcome.problems.append(f"{time.monotonic():.2f} {what}")


def _position(event_id: str, index: int) -> int:
    """Tokens of a choice that the reader of this event has, by the event's own id."""
    found = re.match(r"\d+", event_id.split("~")[0].split(".")[index])
    assert found is not None, f"event id {event_id!r} does not know choice {index}"
    return int(found[0])
