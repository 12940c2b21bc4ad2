"""What the log and the connection have to say to one HTTP call."""

import asyncio
from dataclasses import dataclass

from gateway.engine.events import Event, TokensArrived


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class ServerLeaves:
    """This process must end, and this call with it."""


Letter = Event | ClientGone | ServerLeaves


class Mailbox:
    """Letters in the order of their arrival; a slow reader finds several at once."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._last_tokens: dict[tuple[str, int], TokensArrived] = {}  # by request and choice
        self._arrived = asyncio.Event()

    def put(self, letter: Letter) -> None:
        """Never blocks: the log is not to wait for one slow client."""
        if not self._joins_waiting(letter):
            self._letters.append(letter)
        self._arrived.set()

    async def take(self) -> list[Letter]:
        """All letters there are, at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        letters, self._letters = self._letters, []
        self._last_tokens.clear()
        return letters

    def _joins_waiting(self, letter: Letter) -> bool:
        """Tokens that a slow reader has not taken yet wait as plain numbers.

        They go to those of the same choice that wait already: letters of other choices between
        them say nothing about this one.
        """
        if not isinstance(letter, TokensArrived) or letter.logprobs:
            return False
        last = self._last_tokens.setdefault((letter.request_id, letter.choice), letter)
        if last is letter:
            return False
        last.tokens.extend(letter.tokens)
        return True
