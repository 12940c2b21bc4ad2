"""What waits at one scheduler, counted from what it says of each request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core import events
from shared.messages.requests import Submit
from tests.simulation.profile import Profile


@dataclass(slots=True)
class Waiting:
    """Requests that were accepted and not admitted yet.

    Args:
        profile: has the bounds.
        accepted: by any scheduler so far; such a request is not refused, whoever is asked next.
    """

    profile: Profile
    accepted: set[str]
    _requests: dict[str, Submit] = field(default_factory=dict)

    def clear(self) -> None:
        """A new epoch begins; what was accepted is taken over."""
        self._requests.clear()

    def too_much(self, taken: Sequence[events.Note]) -> str | None:
        """A request that was accepted though there was no room for it, and why that is so."""
        submits = {wish.submit.request_id: wish.submit for wish in self.profile.wishes}
        found = None
        for note in taken:
            if isinstance(note, events.Accepted):
                found = self._accept(note, submits) or found
            elif isinstance(note, (events.Admitted, events.Ended)):
                self._requests.pop(note.request_id, None)
        return found

    def _accept(self, note: events.Accepted, submits: Mapping[str, Submit]) -> str | None:
        submit = self._requests[note.request_id] = submits[note.request_id]
        is_new = not note.recovered and note.request_id not in self.accepted
        self.accepted.add(note.request_id)
        if not is_new:
            return None
        profile, waiting = self.profile, self._requests.values()
        mine = [found for found in waiting if found.tenant == submit.tenant]
        for count, bound, what in (
            (len(waiting), profile.max_waiting_requests, "requests"),
            (len(mine), profile.max_tenant_requests, "requests of its key"),
            (
                sum(len(found.prompt) for found in mine),
                profile.max_tenant_tokens,
                "tokens of its key",
            ),
        ):
            if 0 < bound < count:
                return f"{note.request_id} was accepted: {count} {what} wait, at most {bound} may"
        return None
