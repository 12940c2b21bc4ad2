"""Adds the commands in ``requests`` to a timeline: those of gateways and of the scheduler. Pure."""

from scheduler_svc.explain.request_tracker import RequestTracker
from scheduler_svc.explain.timeline import Kind, Timeline, When, asked_for, counted, listed, size_of
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.requests import Abort, Attach, Drain, GatewayLost, Stop, Submit


class RequestCommands:
    """Commands that concern one request; their effects are in ``outputs``.

    Args:
        timeline: the events are added to it.
        tracker: has the delivery of the request at that moment.
    """

    def __init__(self, timeline: Timeline, tracker: RequestTracker) -> None:
        self._timeline = timeline
        self._tracker = tracker

    def take(self, at: EntryId, message: Message) -> None:
        """Take the next message, of any request; ids in ``requests`` begin with a time in ms."""
        when = When(at.epoch)
        if getattr(message, "request_id", self._timeline.request_id) != self._timeline.request_id:
            return
        match message:
            case Submit():
                text = f"submitted by gateway {message.gateway}: {asked_for(message)}"
                self._timeline.add(Kind.SUBMITTED, when, text, **size_of(message))
            case Attach():
                self._attach(message, when)
            case Stop():
                text = f"a stop string ends choice {message.choice} after "
                text += counted(message.num_tokens, "token")
                facts = {"choice": message.choice, "num_tokens": message.num_tokens}
                self._timeline.add(Kind.STOP, when, text, **facts)
            case Abort():
                self._abort(message, when)
            case GatewayLost() if message.gateway == self._tracker.request.gateway:
                text = f"its gateway {message.gateway} is gone for too long"
                self._add_unless_ended(Kind.GATEWAY_LOST, when, text)
            case Drain():
                text = "the scheduler is about to stop: no new request is admitted"
                self._add_unless_ended(Kind.DRAINING, when, text)

    def _attach(self, attach: Attach, when: When) -> None:
        lengths = [len(view.tokens) for view in attach.views]
        has = (
            f"its client has {listed([str(n) for n in lengths])} tokens"
            if lengths
            else ("nothing was delivered, or that is not said")
        )
        exact = ", and nothing else will do" if attach.exact else ""
        brings = ""
        if attach.submit is not None and not attach.submit.lacks_prompt:
            brings = f"; with the request: {asked_for(attach.submit)}"
        known = self._tracker.request.submit
        is_void = known is not None and attach.is_void_for(known)
        void = "; void, since another delivery has taken over" if is_void else ""
        self._timeline.add(
            Kind.ATTACH,
            when,
            f"gateway {attach.gateway} wants to deliver it: {has}{exact}{brings}{void}",
            gateway=attach.gateway,
            attachment=attach.attachment,
            num_tokens=lengths,
            exact=attach.exact,
        )

    def _abort(self, abort: Abort, when: When) -> None:
        known = self._tracker.request.attachment
        stale = bool(known) and known != abort.attachment
        ignored = "; ignored, since another delivery has taken over" if stale else ""
        text = f"abort asked for: {abort.reason}{ignored}"
        self._timeline.add(Kind.ABORT, when, text, reason=abort.reason, stale=stale)

    def _add_unless_ended(self, kind: Kind, when: When, text: str) -> None:
        if self._tracker.request.is_open:
            self._timeline.add(kind, when, text)
