"""Honest clients beside hostile ones: their answers must equal those of an undisturbed run."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.client import Client, Outcome
from tests.chaos.http_stream import Broken
from tests.chaos.report import is_equal
from tests.chaos.workload import Ask, make_asks

_TOKENS = (8, 64)
_DEADLINE_S = 120.0
_CALM_DEADLINE_S = 60.0
_AWAY_S = 3.0
_STAYS_EVENTS = 5
_LATE = "not complete after"  # end of an answer that did not come in time


class Returning(Client):
    """A client that loses its connection in the middle of an answer, and reconnects later."""

    _seen = 0
    _must_return = False

    def _event(self, text: str) -> None:
        super()._event(text)
        self._seen += 1
        if self._seen == _STAYS_EVENTS and not self._ended:
            self._must_return = True
            raise Broken("left in the middle")

    async def _try(self) -> None:
        await super()._try()
        if self._must_return:
            self._must_return = False
            await asyncio.sleep(_AWAY_S)


@dataclass(slots=True)
class Honesty:
    """The results of honest clients.

    Attributes:
        answered: number of answers, of any kind.
        lost: descriptions of answers that are incomplete, or have gaps or repetitions.
        changed: descriptions of answers that are complete and differ from the undisturbed run.
        ended: descriptions of answers that ended with an expected error.
    """

    answered: int = 0
    resumed: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class HonestClients:
    """Clients with keys of their own that send the same requests in every round.

    Args:
        ports: of the gateways.
        keys: API keys, one for each client; the last client is a ``Returning``.
        num_requests: of each client.
    """

    def __init__(
        self, ports: Sequence[int], keys: Sequence[str], seed: int, num_requests: int
    ) -> None:
        self._ports = ports
        self._headers = [{"Authorization": f"Bearer {key}"} for key in keys]
        self._asks = make_asks(seed, len(keys), num_requests, _TOKENS)
        self._expected: dict[str, Outcome] = {}
        self.seen = Honesty()

    async def undisturbed(self) -> None:
        """Get every answer once, for comparison.

        Raises:
            ExceptionGroup: an answer did not come.
        """
        async with asyncio.TaskGroup() as clients:
            for index, asks in enumerate(self._asks):
                clients.create_task(self._undisturbed(index, asks))

    async def _undisturbed(self, index: int, asks: Sequence[Ask]) -> None:
        for what in asks:
            one = Client(
                what,
                "calm",
                self._ports,
                True,
                index,
                _CALM_DEADLINE_S,
                headers=self._headers[index],
            )
            outcome = await one.run()
            if not outcome.is_complete:
                raise RuntimeError(f"undisturbed, {what.key} is not complete: {outcome.why}")
            self._expected[what.key] = outcome

    async def until(self, until_s: float, label: str, may_end: bool) -> None:
        """Send requests until a time of the monotonic clock, and wait for the answers.

        Args:
            label: distinguishes this round from others.
            may_end: whether answers may end with an error; they must never be changed or late.
        """
        async with asyncio.TaskGroup() as clients:
            for index in range(len(self._asks)):
                clients.create_task(self._until(index, until_s, label, may_end))

    async def _until(self, index: int, until_s: float, label: str, may_end: bool) -> None:
        asks, turn = self._asks[index], 0
        kind = Returning if index == len(self._asks) - 1 else Client
        while time.monotonic() < until_s:
            what = asks[turn % len(asks)]
            run = f"{label}.{turn // len(asks)}"
            one = kind(
                what,
                run,
                self._ports,
                True,
                index + turn,
                _DEADLINE_S,
                headers=self._headers[index],
            )
            self._judge(await one.run(), run, may_end, self._expected)
            turn += 1

    def _judge(
        self, outcome: Outcome, run: str, may_end: bool, expected: Mapping[str, Outcome]
    ) -> None:
        seen, name = self.seen, f"{run}-{outcome.ask.key} id={outcome.request_id}"
        seen.answered += 1
        seen.resumed += outcome.num_resumed
        if outcome.num_duplicates or outcome.num_gaps:
            seen.lost.append(f"{name}: {outcome.num_duplicates} repeated, {outcome.num_gaps} gaps")
        elif not outcome.is_complete:
            what = f"{name}: {outcome.why} {outcome.problems[-3:]}"
            late = outcome.why is not None and outcome.why.startswith(_LATE)
            (seen.ended if may_end and not late else seen.lost).append(what)
        elif not is_equal(outcome, expected):
            texts = [choice.text for choice in outcome.choices]
            other = [choice.text for choice in expected[outcome.ask.key].choices]
            seen.changed.append(f"{name}: {texts} instead of {other}")
