"""Accepts requests, recovers them from earlier epochs, and attaches gateways to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scheduler_svc.core import events
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.requests.client_views import (
    complete_views,
    continued,
    delivered_by,
    may_follow,
)
from scheduler_svc.core.requests.ended_requests import FAILURES, EndedChoice, EndedRequest
from scheduler_svc.core.requests.endings import Endings
from scheduler_svc.core.requests.feasibility import why_never
from scheduler_svc.core.requests.known_requests import Acceptance, KnownRequests
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.requests.request_states import Answers
from scheduler_svc.core.sequences.backlog import Deadlines
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import NO_TOKENS, SequenceGroup
from scheduler_svc.core.step.planner import StepPlanner
from shared.codec import IntArray, Message
from shared.messages.endings import FinishReason
from shared.messages.outputs import RequestEnded
from shared.messages.requests import Attach, ChoiceView, Pin, Submit

# Workers in a row, the last two of them with nothing else to compute. One such death may be a
# coincidence: workers are also killed from outside.
_MAX_DEATHS = 4


class Requests:
    """Puts requests into the waiting queue, and answers gateways that deliver them.

    Args:
        config: limits.
        known: all requests.
        deadlines: of those that have not ended.
        endings: ends what cannot go on.
        planner: computes the sequences.
        prefixes: pinned ones.
        retention: decides how far the outputs log may be trimmed.
        answers: makes the messages for gateways.
        emit: takes each event.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        known: KnownRequests,
        deadlines: Deadlines,
        endings: Endings,
        planner: StepPlanner,
        prefixes: PinnedPrefixes,
        retention: Retention,
        answers: Answers,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._config = config
        self._known = known
        self._deadlines = deadlines
        self._endings = endings
        self._planner = planner
        self._prefixes = prefixes
        self._retention = retention
        self._answers = answers
        self._emit = emit

    # ------------------------------------------------------------- beginnings

    def submit(self, submit: Submit) -> list[Message]:
        """Accept a new request; if it is known, the gateway attaches to it."""
        known, request_id = self._known, submit.request_id
        if request_id in known.by_request or known.remembered.find(request_id):
            again = (request_id, submit.gateway, submit.attachment, submit)
            # If its delivery was aborted before, it is new all the same, and may be refused.
            return self.attach(Attach(*again, views=(), exact=False, is_new=True))
        if (refusal := self._why_full(submit)) is not None:
            return refusal
        return self._accept(submit, None, {})

    def _why_full(self, submit: Submit) -> list[Message] | None:
        """The refusal of a request for which too many others wait, or None."""
        found = self._planner.queues.backlog.why_full(submit)
        if found is None:
            return None
        self._emit(events.Refused(submit.request_id, found.reason))
        ended = self._answers.ended(submit.request_id, FinishReason.OVERLOADED, found.reason)
        return [replace(ended, for_all=found.for_all)]

    def recover(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray],
        ended: Mapping[int, EndedChoice],
        search: BeamSearch | None,
        num_deaths: int,
        was_admitted: bool,
        accepted: Acceptance,
    ) -> list[Message]:
        """Accept an unfinished request of an earlier epoch; see ``Scheduler.recover``."""
        if num_deaths >= _MAX_DEATHS:
            reason = f"{num_deaths} workers in a row have died computing this request"
            self._emit(events.Refused(submit.request_id, reason))
            return self._endings.end_unstarted(submit, FinishReason.ERROR, reason)
        if search is None:
            # A log that was damaged may hold more of one choice than of another.
            shortest = min(map(len, outputs.values()), default=0)
            outputs = {choice: output[:shortest] for choice, output in outputs.items()}
        return self._accept(submit, outputs, ended, search, accepted, num_deaths, was_admitted)

    def remember(self, request_id: str, ended: EndedRequest) -> None:
        """Remember a request that ended in an earlier epoch, not long ago."""
        self._known.remembered.add(request_id, ended, self._known.now_ms)

    def pin(self, pin: Pin) -> None:
        """Pin a prefix, and compute it unless its blocks are there."""
        submit = self._prefixes.add(pin)
        if submit is None:
            return
        sequence = self._known.new_sequence(0, NO_TOKENS)
        group = self._known.new_group(submit, [sequence], {}, max_output=1, computes_prefix=True)
        self._prefixes.computed_by(group)
        self._planner.queues.add_waiting(group)

    def _accept(
        self,
        submit: Submit,
        outputs: Mapping[int, IntArray] | None,
        ended: Mapping[int, EndedChoice],
        search: BeamSearch | None = None,
        accepted: Acceptance | None = None,
        num_deaths: int = 0,
        was_admitted: bool = False,
    ) -> list[Message]:
        """Put a request into the waiting queue, unless it can never run.

        Args:
            outputs: generated tokens of the choices that go on; None: nothing is generated yet.
            accepted: in an earlier epoch; None: now.
        """
        if submit.request_id in self._known.by_request:
            return []
        if search is not None and search.done:
            message = self._answers.beams_ended(submit.request_id, search)
            return self._endings.end_with(submit, message)
        num_prompt = len(submit.prompt)
        max_output = min(submit.sampling.max_tokens, self._config.max_model_len - num_prompt)
        if (reason := why_never(self._config, submit, max_output)) is not None:
            self._emit(events.Refused(submit.request_id, reason))
            return [self._answers.ended(submit.request_id, FinishReason.ERROR, reason)]
        if outputs is None:
            outputs = dict.fromkeys(range(submit.num_choices), NO_TOKENS)
        if any(len(output) >= max_output for output in outputs.values()):
            return self._end_too_long(submit, outputs, ended)
        if submit.sampling.beams is not None and search is None:
            search = BeamSearch(submit.sampling.beams, max_output)
            outputs = {0: NO_TOKENS}
        sequences = [self._known.new_sequence(choice, output) for choice, output in outputs.items()]
        group = self._known.new_group(submit, sequences, ended, max_output, accepted, search=search)
        group.num_deaths = num_deaths
        self._planner.queues.add_waiting(group)
        has_begun = bool(ended) or any(len(found.output) for found in sequences)
        group.was_admitted = was_admitted or has_begun
        self._deadlines.add(group)
        self._emit(events.Accepted(submit.request_id, num_prompt, accepted is not None))
        return [self._answers.begun(group)]

    def _end_too_long(
        self, submit: Submit, outputs: Mapping[int, IntArray], ended: Mapping[int, EndedChoice]
    ) -> list[Message]:
        """End a request that has as many tokens as a context that is smaller now."""
        if submit.sampling.beams is not None:
            reason = f"the context is now too short for its beams: {self._config.max_model_len}"
            return self._endings.end_unstarted(submit, FinishReason.ERROR, reason)
        over = {
            choice: EndedChoice(found, FinishReason.LENGTH) for choice, found in outputs.items()
        }
        return self._endings.end_by_choices(submit, {**ended, **over})

    # ------------------------------------------------------------- attachments

    def attach(self, attach: Attach) -> list[Message]:
        """Let a gateway deliver a request from here on; its client's view wins."""
        group = self._known.by_request.get(attach.request_id)
        if group is not None:
            return self._attach_to(group, attach)
        ended = self._known.remembered.find(attach.request_id)
        submit = attach.submit
        if ended is not None and (answers := self._answer_again(ended, attach)) is not None:
            return answers
        known = None if ended is None else ended.submit
        submit = known if submit is None else submit.with_prompt_of(known)
        if submit is None:
            reason = "there is no such request, or it ended too long ago"
            return [self._answers.ended(attach.request_id, FinishReason.UNKNOWN, reason)]
        if attach.is_new and (refusal := self._why_full(submit)) is not None:
            return refusal
        self._known.remembered.forget(attach.request_id)
        submit = delivered_by(attach, submit, ended)
        views = complete_views(attach, submit)
        # A request that was accepted before cannot exceed the queue's time limit now.
        was_admitted = not attach.is_new
        if not views or submit.sampling.beams is not None:
            return self._accept(submit, None, {}, was_admitted=was_admitted)
        outputs, over = continued(views)
        if not outputs:
            return self._endings.end_by_choices(submit, over)
        if len(set(map(len, outputs.values()))) > 1:
            return self._cannot_join(submit)
        return self._accept(submit, outputs, over, was_admitted=was_admitted)

    def _answer_again(self, ended: EndedRequest, attach: Attach) -> list[Message] | None:
        """The messages that ended a request, or None if they do not fit what the client has."""
        message, submit = ended.message, ended.submit
        is_void = submit is not None and attach.is_void_for(submit)
        if submit is not None and not is_void:
            submit = delivered_by(attach, submit)
        if message is None and submit is not None:
            fits = not attach.exact and may_follow(ended.choices, complete_views(attach, submit))
            if not fits and not is_void:
                return None
            self._known.remembered.deliver(submit)
            shown = submit if attach.submit is None else submit.without_prompt()
            return [self._answers.ended_choices(shown, ended.choices)]
        moved = ended.attachment != attach.attachment and attach.submit is not None
        if isinstance(message, RequestEnded) and message.reason == FinishReason.ABORT and moved:
            return None  # the client came back through another gateway, or never left this one
        assert message is not None, "it ended by its choices or by a message"
        failed = isinstance(message, RequestEnded) and message.reason in FAILURES
        if submit is not None and not failed:
            self._known.remembered.deliver(submit)
            shown = submit if attach.submit is None else submit.without_prompt()
            return [self._answers.ended_choices(shown, {}), message]
        return [message]

    def _attach_to(self, group: SequenceGroup, attach: Attach) -> list[Message]:
        """Let a gateway deliver a request that has not ended.

        If the client's view fits the log, the next checkpoint answers; else the request rewinds.
        """
        lacks_prompt = attach.submit is None
        if attach.is_void_for(group.submit):
            self._retention.request_state(group, lacks_prompt)
            return []
        group.submit = delivered_by(attach, group.submit)
        views = complete_views(attach, group.submit)
        if attach.exact and not views:
            views = (ChoiceView(NO_TOKENS, ""),) * group.submit.num_choices
        if group.search is not None or not views:
            self._retention.request_state(group, lacks_prompt)
            return []
        known = dict(group.ended)
        for sequence in group.sequences:
            known[sequence.choice] = EndedChoice(self._planner.output(sequence), "")
        if not attach.exact and may_follow(known, views):
            self._retention.request_state(group, lacks_prompt)
            return []
        return self._rewind(group, views, known, attach.exact)

    def _rewind(
        self,
        group: SequenceGroup,
        views: Sequence[ChoiceView],
        known: Mapping[int, EndedChoice],
        exact: bool,
    ) -> list[Message]:
        """Continue a request from what its client has instead of what the log has."""
        outputs, over = continued(views, None if exact else known)
        if len(set(map(len, outputs.values()))) > 1:
            self._endings.end_all(group, FinishReason.ERROR)
            return self._cannot_join(group.submit)
        for choice, output in list(outputs.items()):
            if len(output) >= group.max_output:
                over[choice] = EndedChoice(outputs.pop(choice), FinishReason.LENGTH)
        if not outputs:
            submit = group.submit
            self._endings.end_all(group, FinishReason.STOP)
            return self._endings.end_by_choices(submit, over)
        known_requests = self._known
        for sequence in group.sequences:
            del known_requests.by_handle[sequence.handle]
        sequences = [known_requests.new_sequence(*found) for found in outputs.items()]
        self._planner.replace(group, sequences)
        known_requests.add_sequences(group)
        group.ended = over
        group.was_admitted |= len(sequences[0].output) > 0
        self._emit(events.Rewound(group.request_id, len(sequences[0].output)))
        return [self._answers.begun(group)]

    def _cannot_join(self, submit: Submit) -> list[Message]:
        """End a request whose choices cannot continue as one group."""
        reason = "the client has choices of different lengths, which differ from the log's"
        return self._endings.end_unstarted(submit, FinishReason.ERROR, reason)
