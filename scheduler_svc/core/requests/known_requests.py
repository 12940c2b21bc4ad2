"""The table of known requests: those that have not ended, and, for a while, those that have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.requests.ended_requests import EndedChoice, RememberedRequests
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from shared.codec import IntArray
from shared.messages.requests import Submit


@dataclass(frozen=True, slots=True)
class Acceptance:
    """When a request was accepted.

    Attributes:
        arrival: place in the order of all requests; 0: behind all others.
        at_ms: by the engine's clock; 0: not known.
    """

    arrival: int = 0
    at_ms: int = 0


NOT_KNOWN: Final = Acceptance()


class KnownRequests:
    """Sequence groups by request, and their sequences by handle.

    Args:
        resume_window_ms: how long ended requests are remembered.
        new_handle: gives every sequence its handle.

    Attributes:
        by_request: groups that have not ended.
        by_handle: their sequences; those of beam searches are not here.
        remembered: requests that have ended.
        now_ms: the engine's clock.
    """

    def __init__(self, resume_window_ms: int, new_handle: Callable[[], int]) -> None:
        self.by_request: dict[str, SequenceGroup] = {}
        self.by_handle: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self.remembered = RememberedRequests(resume_window_ms)
        self.now_ms = 0
        self._new_handle = new_handle
        self._last_arrival = 0

    def set_clock(self, now_ms: int) -> None:
        """Advance the clock, and forget requests that ended too long ago.

        Nothing may have been planned for longer than anything is remembered.
        """
        self.now_ms = max(self.now_ms, now_ms)
        self.remembered.expire(self.now_ms)

    def new_sequence(self, choice: int, output: IntArray) -> Sequence:
        """A sequence with a fresh handle."""
        return Sequence(choice, self._new_handle(), output)

    def new_group(
        self,
        submit: Submit,
        sequences: list[Sequence],
        ended: Mapping[int, EndedChoice],
        max_output: int,
        accepted: Acceptance | None = None,
        search: BeamSearch | None = None,
        computes_prefix: bool = False,
    ) -> SequenceGroup:
        """Make a group that arrives after all others, and enter it here.

        Args:
            accepted: in an earlier epoch; None: now.
        """
        accepted = accepted or Acceptance(0, self.now_ms)
        self._last_arrival = max(self._last_arrival + 1, accepted.arrival)
        group = SequenceGroup(
            submit=submit,
            arrival=self._last_arrival,
            accepted_ms=accepted.at_ms,
            max_output=max_output,
            sequences=sequences,
            ended=dict(ended),
            search=search,
            computes_prefix=computes_prefix,
        )
        self.by_request[submit.request_id] = group
        if search is None:
            self.add_sequences(group)
        else:
            group.handle = sequences[0].handle
        return group

    def add_sequences(self, group: SequenceGroup) -> None:
        """Make a group's sequences findable by the handles in results."""
        self.by_handle.update((found.handle, (group, found)) for found in group.sequences)
