"""The requests whose outputs a gateway waits for, by id and by the handles of this epoch."""

from collections.abc import Sequence

from gateway.engine.delivered_tokens import DeliveredChoice, DeliveredRequest
from shared.messages.endings import FinishReason
from shared.messages.requests import ChoiceView, delivery_of


class OpenRequests:
    """Finds requests by id, their choices by handle, beam searches by the handle of their group.

    Attributes:
        by_handle: choices that run; read here for every token, and changed by the methods alone.
    """

    def __init__(self) -> None:
        self._requests: dict[str, DeliveredRequest] = {}
        self.by_handle: dict[int, DeliveredChoice] = {}
        self._by_group: dict[int, DeliveredRequest] = {}
        # Accepted in an earlier epoch; the states of this one come before its first result.
        self._to_be_restated: set[str] = set()
        self._lookups: dict[str, str] = {}  # attachment by request, while there is no answer

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        """Ids, in the order in which the requests were opened."""
        return list(self._requests)

    # ----------------------------------------------------------- open and close

    def open(
        self,
        request_id: str,
        attachment: str,
        num_choices: int = 1,
        scored: bool = False,
        is_search: bool = False,
        views: Sequence[ChoiceView] = (),
        overtaken: tuple[str, ...] = (),
    ) -> None:
        """Add a request; before its Submit is appended, or its state could be missed.

        Args:
            attachment: names this delivery in the log.
            scored: its tokens come with log-probabilities.
            views: by choice, what the client has already; empty for nothing at all.
            overtaken: earlier deliveries that the log has seen replaced, as far as is known.
        """
        choices = [DeliveredChoice(request_id, index, scored) for index in range(num_choices)]
        request = DeliveredRequest(
            choices, delivery_of(attachment), attachment, is_search, overtaken=overtaken
        )
        if views:
            request.begin_with(views)
        self._requests[request_id] = request

    def attach(self, request_id: str) -> DeliveredRequest:
        """Ignore the log for a request until it answers a new attachment.

        Returns:
            What was delivered so far.
        """
        request = self._requests[request_id]
        self.drop_handles(request)
        request.attach()
        return request

    def close(self, request_id: str) -> None:
        """Remove a request, if it is there."""
        self._lookups.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.drop_handles(request)

    def close_choice(
        self, request_id: str, index: int, num_tokens: int, reason: FinishReason
    ) -> None:
        """End a choice after so many tokens, whatever the engine still generates for it."""
        request = self._requests.get(request_id)
        if request is None or request.choices[index].ended:
            return
        choice = request.choices[index]
        choice.finish_reason = reason
        del choice.tokens[num_tokens:]
        self.drop_handle(choice)

    def find(self, request_id: str) -> DeliveredRequest | None:
        """An open request; None if there is none of this id."""
        return self._requests.get(request_id)

    def attachment_of(self, request_id: str) -> str | None:
        """The attachment by which the log names an open request."""
        request = self._requests.get(request_id)
        return None if request is None else request.attachment

    # ----------------------------------------------------------------- look-ups

    def look_up(self, request_id: str, attachment: str) -> None:
        """Wait for the state of a request, and for nothing else of it."""
        self._lookups[request_id] = attachment

    def lookup_of(self, request_id: str) -> str | None:
        """The attachment of a look-up without an answer."""
        return self._lookups.get(request_id)

    def end_lookup(self, request_id: str) -> None:
        """The look-up has its answer."""
        del self._lookups[request_id]

    # ------------------------------------------------------- what is still to come

    def awaits(self, request_id: str) -> bool:
        """Whether the log still has to answer the request's attachment."""
        request = self._requests.get(request_id)
        return request_id in self._lookups or (request is not None and request.awaits)

    def lacks_state(self, request_id: str) -> bool:
        """Whether a RequestState must come before anything can be delivered.

        It comes once a scheduler has read the Submit or has taken over, unless it was trimmed.
        """
        request = self._requests.get(request_id)
        if request is None or request.awaits or request.has_ended:
            return False
        return not request.was_stated or request_id in self._to_be_restated

    def start_epoch(self) -> None:
        """Drop all handles; the epoch restates accepted requests before its first result."""
        self._to_be_restated = {
            request_id
            for request_id, request in self._requests.items()
            if request.was_stated and not request.awaits and not request.has_ended
        }
        for request in self._requests.values():
            self.drop_handles(request)

    def restated(self, request_id: str) -> None:
        """This epoch has a state, or the end, of the request."""
        self._to_be_restated.discard(request_id)

    def take_not_restated(self) -> list[str]:
        """Requests that this epoch should have restated by now; each is returned once."""
        if not self._to_be_restated:
            return []
        found = [request_id for request_id in self._requests if request_id in self._to_be_restated]
        self._to_be_restated = set()
        return found

    # ------------------------------------------------------------------ handles

    @property
    def has_handles(self) -> bool:
        """Whether a result can concern any request here."""
        return bool(self.by_handle or self._by_group)

    def request_of(self, handle: int) -> DeliveredRequest | None:
        """The request of which a choice, or the beam group, has this handle."""
        choice = self.by_handle.get(handle)
        if choice is None:
            return self._by_group.get(handle)
        return self._requests[choice.request_id]

    def set_handle(self, choice: DeliveredChoice, handle: int) -> None:
        """Tokens of this handle are the choice's."""
        choice.handle = handle
        self.by_handle[handle] = choice

    def set_group(self, request: DeliveredRequest, handle: int | None) -> None:
        """This handle is that of the search's beams; None: all have finished."""
        request.group = handle
        if handle is not None:
            self._by_group[handle] = request

    def drop_handles(self, request: DeliveredRequest) -> None:
        """Results concern the request no more."""
        for choice in request.choices:
            self.drop_handle(choice)
        if request.group is not None:
            self._by_group.pop(request.group, None)
            request.group = None

    def drop_handle(self, choice: DeliveredChoice) -> None:
        """Results concern the choice no more."""
        if choice.handle is not None:
            self.by_handle.pop(choice.handle, None)
            choice.handle = None
