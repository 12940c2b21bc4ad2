"""Asks the engine for requests of which only the ids are known."""

from collections.abc import Sequence

from starlette.types import Receive

from gateway.engine.client import EngineClient
from gateway.engine.events import EngineUnreachable, Joined, NotRemembered, Superseded
from gateway.engine.mailbox import ClientGone, Letter, Mailbox, ServerLeaves
from gateway.http.errors import shutting_down, taken_over, unavailable
from gateway.openai.generation import ClientLeft
from gateway.openai.responses import watching


class LookUp:
    """Requests that somebody wants to go on with; from here on nobody else delivers them.

    Either ``close`` or ``abandon`` must be called in the end.

    Args:
        receive: tells when the client leaves.
    """

    def __init__(self, engine: EngineClient, receive: Receive) -> None:
        self._engine = engine
        self._receive = receive
        self._mailbox = Mailbox()
        self._found: dict[str, Joined | None] = {}
        self._asked: list[str] = []

    async def ask(self, request_ids: Sequence[str]) -> list[Joined | None]:
        """What the engine knows of each of these requests; None for what it does not remember.

        Raises:
            ApiError: 503, the engine does not answer; 409, somebody else wants one of them.
            ClientLeft: nobody waits any more.
        """
        for identity in request_ids:
            self._asked.append(identity)
            self._engine.look_up(identity, self._mailbox)
        async with watching(self._receive, lambda: self._mailbox.put(ClientGone())):
            while len(self._found) < len(self._asked):
                for letter in await self._mailbox.take():
                    self._open(letter)
        return [self._found[identity] for identity in request_ids]

    def close(self) -> None:
        """What goes on is delivered by another call, or by whoever asked."""
        for identity in self._asked:
            self._engine.close(identity, self._mailbox)

    def abandon(self, after_s: float) -> None:
        """Abort after a while what nobody takes: earlier deliveries may have ended for this one."""
        for identity in self._asked:
            self._engine.abandon(identity, self._mailbox, after_s)

    def _open(self, letter: Letter) -> None:
        if isinstance(letter, Joined):
            self._found[letter.request_id] = letter
        elif isinstance(letter, NotRemembered):
            self._found[letter.request_id] = None
            self._engine.close(letter.request_id, self._mailbox)  # there is nothing to abort
        elif isinstance(letter, ClientGone):
            raise ClientLeft
        elif isinstance(letter, EngineUnreachable):
            raise unavailable(letter.why)
        elif isinstance(letter, Superseded):
            raise taken_over()
        elif isinstance(letter, ServerLeaves):
            raise shutting_down(accepted=False)
