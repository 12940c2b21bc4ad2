"""What clients may lose by the faults of a run, and what they must not."""

from collections.abc import Sequence

from tests.simulation.deployment.client import Client
from tests.simulation.deployment.clients import Outcome
from tests.simulation.deployment.loop import Party
from tests.simulation.deployment.model import Model
from tests.simulation.deployment.processes import SchedulerProcess
from tests.simulation.deployment.server import Server
from tests.simulation.profile import Profile


class Allowances:
    """Decides which losses the faults of a run excuse.

    Args:
        profile: of the run.
        server: counts what it has lost.
        model: has drawn the tokens.
        parties: all processes so far.
        schedulers: those of them that are schedulers.
        clients: all clients so far.
    """

    def __init__(
        self,
        profile: Profile,
        server: Server,
        model: Model,
        parties: Sequence[Party],
        schedulers: Sequence[SchedulerProcess],
        clients: Sequence[Client],
    ) -> None:
        self._profile = profile
        self._server = server
        self._model = model
        self._parties = parties
        self._schedulers = schedulers
        self._clients = clients

    def may_be_lost(self, client: Client, outcome: Outcome, why: str) -> bool:
        """No process is left that has what the log has lost, or a request killed its workers."""
        losses = self._server.num_losses
        if outcome is Outcome.REFUSED:
            return self._profile.has_bounds
        if outcome is Outcome.FAILED:
            # One that was replaced counts as one that has died, one that was only silent does not.
            num_workers = sum(found.role == "worker" for found in self._parties)
            deadly = "workers in a row" in why and num_workers > 4
            return deadly or ("different lengths" in why and losses > 0)
        is_scored = client.wish.submit.sampling.num_logprobs is not None
        is_shared = client.wish.submit.num_choices > 1 or self._is_asked_twice(client.request_id)
        if is_scored and is_shared and client.has_moved:
            # The log keeps no log-probabilities: who joins has the tokens drawn again, and who has
            # more of one choice than of another, too. A real model draws the same.
            return True
        return client.has_moved and (losses > 0 or self._is_trimmed(client.request_id))

    def _is_asked_twice(self, request_id: str) -> bool:
        return sum(found.request_id == request_id for found in self._clients) > 1

    def must_agree(self, client: Client) -> bool:
        """Clients that ask for the same must get the same: the log has it, and none has left."""
        is_scored = client.wish.submit.sampling.num_logprobs is not None
        is_forgotten = self._server.num_losses > 0 or self._is_trimmed(client.request_id)
        return not (is_scored or is_forgotten)

    def _is_trimmed(self, request_id: str) -> bool:
        """It has ended, and the log that a later scheduler read was too short to tell of it."""
        watching = [found.watching for found in self._schedulers]
        return (
            self._profile.has_short_log
            and sum(found.num_epochs for found in watching) > 1
            and (
                any(request_id in found.ended for found in watching)
                or self._has_finished(request_id)
            )
        )

    def _has_finished(self, request_id: str) -> bool:
        """Whether or not the scheduler that read it lived to say so."""
        submits = {wish.submit.request_id: wish.submit for wish in self._profile.wishes}
        submit = submits[request_id]
        prompt = tuple(submit.prompt.tolist())
        return self._model.has_finished(prompt, submit.sampling.max_tokens)
