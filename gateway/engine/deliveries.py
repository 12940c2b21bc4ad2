"""The requests that calls of this process wait for, and their Attach messages."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from gateway.engine.event_queue import EventQueue
from gateway.engine.events import (
    Attached,
    Desynchronized,
    EngineUnreachable,
    Event,
    PromptInLog,
    PromptMissing,
    Released,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.engine.open_requests import OpenRequests
from gateway.tracing.phases import PhaseTracker
from shared.logs import EventLog
from shared.messages.outputs import RequestState
from shared.messages.requests import Attach, ChoiceView, Submit

_log = EventLog("gateway.engine.deliveries")

# A scheduler that reads what was appended answers within a step.
_FIRST_REPEAT_S = 2.0
_LONGEST_REPEAT_S = 30.0
# A state that is missing for so long may have been in entries that were trimmed unread.
_STATELESS_S = 10.0
# After a refusal: shorter than any client waits before it asks again, and long enough that most of
# a flood costs neither a look at its bodies nor a way to the engine.
_FULL_S = 0.1


@dataclass(slots=True)
class _Delivery:
    """One request and the call that waits for it.

    Attributes:
        attachment: the last one that was sent to the engine.
        submit: the request, in case the engine does not have it; None if only the id is known.
        attach: the one that has no answer yet, without the prompt.
        stateless_since_s: since when the log lacks a state that it must have.
        give_up_s: when to stop waiting for the engine's first answer; infinite once it came.
    """

    queue: EventQueue
    attachment: str
    submit: Submit | None
    give_up_s: float = inf
    attach: Attach | None = None
    repeat_s: float = 0.0
    pause_s: float = _FIRST_REPEAT_S
    accepted: bool = False
    stateless_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class TakenAway:
    """A delivery that was ended here, to go on in another engine.

    Attributes:
        submit: the request; None if only its id is known.
        views: by choice, what the client has; empty for nothing.
        accepted: the engine had accepted the request.
        attachment: by which an Abort can name the delivery that was ended.
    """

    submit: Submit | None
    queue: EventQueue
    views: tuple[ChoiceView, ...]
    accepted: bool
    attachment: str


class Deliveries:
    """All requests that calls of this process wait for. It does no I/O.

    Args:
        instance: of this gateway.
        send: appends to the requests log as soon as possible.
        clock_s: monotonic.
        phases: follows the requests of traces; None: no traces are recorded.
        on_released: takes the id of a request that the engine hands over, or of one that is looked
            up and that it does not have; None: it is asked for again at the same engine.
    """

    def __init__(
        self,
        instance: str,
        requests: OpenRequests,
        send: Callable[[Attach], None],
        clock_s: Callable[[], float],
        phases: PhaseTracker | None = None,
        on_released: Callable[[str], None] | None = None,
    ) -> None:
        self._instance = instance
        self._on_released = on_released
        self._requests = requests
        self._send = send
        self._clock_s = clock_s
        self._phases = phases
        self._open: dict[str, _Delivery] = {}
        self._full_until_s = -inf
        self._referring: list[RequestState] = []

    @property
    def is_full(self) -> bool:
        """The engine has just refused a request for lack of room, and would refuse any other."""
        return self._clock_s() < self._full_until_s

    def __len__(self) -> int:
        return len(self._open)

    def queues(self) -> set[EventQueue]:
        """The queues of all calls that wait for a request."""
        return {delivery.queue for delivery in self._open.values()}

    def open(
        self,
        submit: Submit,
        queue: EventQueue,
        views: Sequence[ChoiceView] = (),
        accepted: bool = False,
        patience_s: float = inf,
    ) -> None:
        """Wait for a request that is about to be submitted or attached to.

        Args:
            accepted: the engine has accepted the request before.
            patience_s: how long to wait for the engine's first answer before giving up.
        """
        self.supersede(submit.request_id)
        self._requests.open(
            submit.request_id,
            submit.attachment,
            submit.num_choices,
            scored=submit.sampling.num_logprobs is not None,
            is_search=submit.sampling.beams is not None,
            views=views,
            overtaken=submit.overtaken,
        )
        self._open[submit.request_id] = _Delivery(
            queue, submit.attachment, submit, self._clock_s() + patience_s, accepted=accepted
        )
        if self._phases is not None:
            self._phases.open(submit, is_known=accepted)

    def attach(self, request_id: str) -> None:
        """Ask the engine to go on from what the client has."""
        delivery = self._open[request_id]
        assert delivery.submit is not None, request_id
        delivered = self._requests.attach(request_id)
        attachment = delivered.attachment
        submit = replace(
            delivery.submit,
            gateway=self._instance,
            attachment=attachment,
            overtaken=delivered.overtaken,
        )
        attach = Attach(
            request_id,
            self._instance,
            attachment,
            submit,
            delivered.views(),
            exact=submit.sampling.num_logprobs is not None,
            is_new=not delivery.accepted,
        )
        # What was accepted is in the log with its prompt, unless the log has lost its end.
        self._send_attach(delivery, attach, with_prompt=not delivery.accepted)

    def attach_unanswered(self, request_id: str, queue: EventQueue) -> None:
        """Attach to what may never have been submitted, unless this call has its end already.

        The reply to the append may be lost, and the engine's refusal be read before that is known.
        """
        if self.is_open(request_id, queue) and self._requests.attachment_of(request_id):
            self.attach(request_id)

    def look_up(
        self, request_id: str, queue: EventQueue, patience_s: float, lost: Submit | None = None
    ) -> None:
        """Ask for the state of a request of which only the id is known.

        Args:
            lost: the request, from another engine that is lost: this one gets it first.
        """
        self.supersede(request_id)
        if lost is not None:
            name = secrets.token_hex(8)
            submit = replace(lost, gateway=self._instance, attachment=name)
            self._send(Attach(request_id, self._instance, name, submit, (), exact=False))
        attachment = secrets.token_hex(8)
        self._requests.look_up(request_id, attachment)
        give_up_s = self._clock_s() + patience_s
        delivery = self._open[request_id] = _Delivery(queue, attachment, None, give_up_s)
        attach = Attach(
            request_id, self._instance, attachment, None, (), exact=False, reads_prompts=True
        )
        self._send_attach(delivery, attach)

    def take_referring(self) -> list[RequestState]:
        """States that answered look-ups since the last call, and whose prompts are to be read."""
        taken, self._referring = self._referring, []
        return taken

    def prompt_not_found(self, request_id: str) -> None:
        """Look a request up again, by an answer that has the prompt itself."""
        delivery = self._open.get(request_id)
        if delivery is not None and delivery.attach is not None:
            self._send_attach(delivery, replace(delivery.attach, reads_prompts=False))

    def supersede(self, request_id: str) -> None:
        """The newer of two deliveries wins: end the one that there is in this process."""
        delivery = self._open.get(request_id)
        if delivery is not None:
            delivery.queue.put(Superseded(request_id))
            self._forget(request_id)

    def submit_of(self, request_id: str) -> Submit | None:
        """The Submit of an open delivery; None if there is none."""
        delivery = self._open.get(request_id)
        return None if delivery is None else delivery.submit

    def is_open(self, request_id: str, queue: EventQueue) -> bool:
        """Whether this call still waits for this request."""
        delivery = self._open.get(request_id)
        return delivery is not None and delivery.queue is queue

    def close(self, request_id: str, queue: EventQueue) -> str | None:
        """The call waits no more.

        Returns:
            The attachment by which an Abort can name what is closed; None if there is nothing,
            or another call waits for the request.
        """
        if not self.is_open(request_id, queue):
            return None
        known = self._requests.attachment_of(request_id)
        attachment = known or self._open[request_id].attachment
        self._forget(request_id)
        return attachment

    def ids(self) -> list[str]:
        """Ids of all requests that calls wait for."""
        return list(self._open)

    def take_away(self, request_id: str) -> "TakenAway | None":
        """End a delivery that another engine goes on with; None if there is none."""
        delivery = self._open.get(request_id)
        if delivery is None:
            return None
        if delivery.submit is None:
            self._forget(request_id)
            return TakenAway(None, delivery.queue, (), False, delivery.attachment)
        delivered = self._requests.attach(request_id)
        submit = replace(delivery.submit, overtaken=delivered.overtaken)
        has_begun = any(choice.tokens or choice.ended for choice in delivered.choices)
        views = delivered.views() if has_begun else ()
        taken = TakenAway(submit, delivery.queue, views, delivery.accepted, delivered.attachment)
        self._forget(request_id)
        return taken

    def dispatch(self, events: Iterable[Event]) -> None:
        """Put events into the queues of their calls, and attach after each Desynchronized."""
        for event in events:
            delivery = self._open.get(event.request_id)
            if delivery is None:
                continue
            if isinstance(event, TokensArrived):  # nearly all are
                delivery.queue.put(event)
                continue
            if isinstance(event, PromptMissing):
                self._send_prompt(event.request_id, delivery)
                continue
            if isinstance(event, PromptInLog):
                self._referring.append(event.state)
                continue
            if isinstance(event, Released):
                if self._on_released is not None:
                    self._on_released(event.request_id)
                continue
            if isinstance(event, UnknownRequest) and event.may_be_elsewhere and self._on_released:
                self._on_released(event.request_id)
                continue
            if isinstance(event, Desynchronized):
                if not self._requests.awaits(event.request_id):
                    continue  # a later event of the same entry has ended it
                _log.warning("attaching", id=event.request_id, why=event.why)
                self.attach(event.request_id)
                continue
            if isinstance(event, (RequestAccepted, Attached)):
                delivery.accepted, delivery.give_up_s = True, inf
            if isinstance(event, RequestFailed):
                _log.warning("request failed", id=event.request_id, error=event.error)
                if event.overloaded and event.for_all:
                    self._full_until_s = self._clock_s() + _FULL_S
            if isinstance(event, Attached):
                delivery.attach = None
            delivery.queue.put(event)

    def server_restarted(self) -> None:
        """Repeat each Attach without an answer at once: the server may have lost it."""
        for delivery in self._open.values():
            delivery.repeat_s, delivery.pause_s = 0.0, _FIRST_REPEAT_S

    def repeat(self) -> None:
        """Repeat each Attach that had no answer for a while."""
        now = self._clock_s()
        for request_id, delivery in self._open.items():
            if delivery.attach is None or now < delivery.repeat_s:
                continue
            if not self._requests.awaits(request_id):
                delivery.attach = None
                continue
            self._send(delivery.attach)
            delivery.repeat_s = now + delivery.pause_s
            delivery.pause_s = min(2 * delivery.pause_s, _LONGEST_REPEAT_S)

    def attach_where_states_lack(self) -> None:
        """Attach to requests whose states should have been read by now."""
        now = self._clock_s()
        for request_id, delivery in self._open.items():
            if not self._requests.lacks_state(request_id):
                delivery.stateless_since_s = None
            elif delivery.stateless_since_s is None:
                delivery.stateless_since_s = now
            elif now >= delivery.stateless_since_s + _STATELESS_S:
                delivery.stateless_since_s = None
                _log.warning("attaching", id=request_id, why="the log has no state of it")
                self.attach(request_id)

    def give_up(self, why: str) -> None:
        """Fail the deliveries that had no answer from the engine within their patience."""
        now = self._clock_s()
        for request_id, delivery in list(self._open.items()):
            if now >= delivery.give_up_s:
                delivery.give_up_s = inf
                if self._requests.awaits(request_id) or self._requests.lacks_state(request_id):
                    delivery.queue.put(EngineUnreachable(request_id, why))

    def give_all_up(self, why: str) -> None:
        """Fail all deliveries."""
        for request_id, delivery in self._open.items():
            delivery.queue.put(EngineUnreachable(request_id, why))

    def _send_attach(self, delivery: _Delivery, attach: Attach, with_prompt: bool = False) -> None:
        """Append an Attach, and later repeat it without the prompt.

        A scheduler that has read the prompt keeps it; one that has not asks for it.
        """
        whole, attach = attach, _without_prompt(attach)
        delivery.attach, delivery.attachment = attach, attach.attachment
        delivery.pause_s = _FIRST_REPEAT_S
        delivery.repeat_s = self._clock_s() + delivery.pause_s
        self._send(whole if with_prompt else attach)

    def _send_prompt(self, request_id: str, delivery: _Delivery) -> None:
        """Attach with the whole Submit: the scheduler does not have the prompt."""
        attach = delivery.attach
        if attach is None or attach.submit is None or not self._requests.awaits(request_id):
            return
        submit = attach.submit.with_prompt_of(delivery.submit)
        assert submit is not None, f"{request_id}: the delivery has another prompt"
        self._send_attach(delivery, replace(attach, submit=submit), with_prompt=True)

    def _forget(self, request_id: str) -> None:
        self._requests.close(request_id)
        del self._open[request_id]
        if self._phases is not None:
            self._phases.close(request_id)


def _without_prompt(attach: Attach) -> Attach:
    submit = attach.submit
    return attach if submit is None else replace(attach, submit=submit.without_prompt())
