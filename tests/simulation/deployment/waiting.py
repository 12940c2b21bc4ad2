"""What waits at one scheduler, counted from its messages about each request."""

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
        accepted: by any scheduler so far; such a request is not refused, whichever is asked next.
    """

    profile: Profile
    accepted: set[str]
    _requests: dict[str, Submit] = field(default_factory=dict)

    def clear(self) -> None:
        """A new epoch begins; what was accepted is taken over."""
        self._requests.clear()

    def too_much(self, taken: Sequence[events.Event]) -> str | None:
        """A request that was accepted though there was no room for it, and why that is so."""
        submits = {wish.submit.request_id: wish.submit for wish in self.profile.wishes}
        found = None
        for event in taken:
            if isinstance(event, events.Accepted):
                found = self._accept(event, submits) or found
            elif isinstance(event, (events.Admitted, events.Ended)):
                self._requests.pop(event.request_id, None)
        return found

    def _accept(self, event: events.Accepted, submits: Mapping[str, Submit]) -> str | None:
        submit = self._requests[event.request_id] = submits[event.request_id]
        is_new = not event.recovered and event.request_id not in self.accepted
        self.accepted.add(event.request_id)
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
                return f"{event.request_id} was accepted: {count} {what} wait, at most {bound} may"
        return None
