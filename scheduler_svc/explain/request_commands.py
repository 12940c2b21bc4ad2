"""What gateways, and the scheduler itself, ask of a request in ``requests``. Pure."""

from scheduler_svc.explain.story import Kind, Story, When, asked_for, counted, listed, size_of
from scheduler_svc.explain.timeline import Chronicle, Phase
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.requests import Abort, Attach, Drain, GatewayLost, Stop, Submit


class Asked:
    """Tells what is asked; what becomes of it is in ``outputs``.

    Args:
        story: where to tell it.
        chronicle: knows who delivers the request at that moment.
    """

    def __init__(self, story: Story, chronicle: Chronicle) -> None:
        self._story = story
        self._chronicle = chronicle

    def take(self, at: EntryId, message: Message) -> None:
        """A message of anybody; ids in ``requests`` begin with a time in milliseconds."""
        when = When(at.epoch)
        if getattr(message, "request_id", self._story.request_id) != self._story.request_id:
            return
        match message:
            case Submit():
                text = f"submitted by gateway {message.gateway}: {asked_for(message)}"
                self._story.tell(Kind.SUBMITTED, when, text, **size_of(message))
            case Attach():
                self._attach(message, when)
            case Stop():
                text = f"a stop string ends choice {message.choice} after "
                text += counted(message.num_tokens, "token")
                facts = {"choice": message.choice, "num_tokens": message.num_tokens}
                self._story.tell(Kind.STOP, when, text, **facts)
            case Abort():
                self._abort(message, when)
            case GatewayLost() if message.gateway == self._chronicle.gateway:
                text = f"its gateway {message.gateway} is gone for too long"
                self._tell_unless_ended(Kind.GATEWAY_LOST, when, text)
            case Drain():
                text = "the scheduler is about to leave: nobody new is admitted"
                self._tell_unless_ended(Kind.DRAINING, when, text)

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
        known = self._chronicle.submit
        is_void = known is not None and attach.is_void_for(known)
        void = "; void, since another delivery has taken over" if is_void else ""
        self._story.tell(
            Kind.ATTACH,
            when,
            f"gateway {attach.gateway} wants to deliver it: {has}{exact}{brings}{void}",
            gateway=attach.gateway,
            attachment=attach.attachment,
            num_tokens=lengths,
            exact=attach.exact,
        )

    def _abort(self, abort: Abort, when: When) -> None:
        known = self._chronicle.attachment
        stale = bool(known) and known != abort.attachment
        ignored = "; ignored, since another delivery has taken over" if stale else ""
        text = f"abort asked for: {abort.reason}{ignored}"
        self._story.tell(Kind.ABORT, when, text, reason=abort.reason, stale=stale)

    def _tell_unless_ended(self, kind: Kind, when: When, text: str) -> None:
        if self._chronicle.phase not in (Phase.UNSEEN, Phase.ENDED):
            self._story.tell(kind, when, text)
