"""The life of requests: accepted, taken over, stopped, aborted, ended, remembered for a while."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler_svc.core import events
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.requests.client_views import (
    complete_views,
    continued,
    delivered_by,
    may_follow,
)
from scheduler_svc.core.requests.ended_requests import (
    FAILURES,
    EndedChoice,
    EndedRequest,
    RememberedRequests,
)
from scheduler_svc.core.requests.feasibility import why_never
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.requests.request_states import Answers
from scheduler_svc.core.sequences.backlog import Deadlines
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import ENDED, NO_TOKENS, PREFILLING, SequenceGroup
from scheduler_svc.core.sequences.sequence import Sequence as TokenSequence
from scheduler_svc.core.step.planner import StepPlanner
from shared.codec import IntArray, Message
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import BeamsEnded, RequestEnded
from shared.messages.requests import Abort, Attach, ChoiceView, GatewayLost, Pin, Stop, Submit

# Workers in a row, the last two of them with nothing else to compute. One such death may be a
# coincidence: workers are also killed from outside.
_MAX_DEATHS = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """When a request was accepted.

    Attributes:
        arrival: place in the order of all; 0: behind those that are known.
        at_ms: by the engine's clock; 0: not known.
    """

    arrival: int = 0
    at_ms: int = 0


NOT_KNOWN: Final = Acceptance()


class Requests:
    """All requests by id and by handle.

    Args:
        config: limits.
        planner: computes their sequences.
        prefixes: pinned ones.
        retention: decides what the outputs log may forget.
        answers: what clients are told.
        new_handle: gives every sequence its handle.
        emit: takes each event.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        planner: StepPlanner,
        prefixes: PinnedPrefixes,
        retention: Retention,
        answers: Answers,
        new_handle: Callable[[], int],
        emit: Callable[[events.Event], None],
    ) -> None:
        self._config = config
        self._planner = planner
        self._prefixes = prefixes
        self._retention = retention
        self._answers = answers
        self._new_handle = new_handle
        self._emit = emit
        self._by_request: dict[str, SequenceGroup] = {}
        self._by_handle: dict[int, tuple[SequenceGroup, TokenSequence]] = {}
        self._remembered = RememberedRequests(config.resume_window_ms)
        self._deadlines = Deadlines(config.queue_ttl_ms)
        self._last_arrival = 0
        self._now_ms = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def find(self, request_id: str) -> SequenceGroup | None:
        """A request that has not ended."""
        return self._by_request.get(request_id)

    def groups(self) -> list[SequenceGroup]:
        """All that have not ended."""
        return list(self._by_request.values())

    # ------------------------------------------------------------- beginnings

    def submit(self, submit: Submit) -> list[Message]:
        """A new request, unless it is one that is known."""
        known = (submit.request_id in self._by_request) or self._remembered.find(submit.request_id)
        if known:
            again = (submit.request_id, submit.gateway, submit.attachment, submit)
            # Of a delivery that was aborted it is the first word: it may still be refused.
            return self.attach(Attach(*again, views=(), exact=False, is_new=True))
        if (refusal := self._why_full(submit)) is not None:
            return refusal
        return self._accept(submit, None, {})

    def _why_full(self, submit: Submit) -> list[Message] | None:
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
        """A request of an earlier epoch."""
        if num_deaths >= _MAX_DEATHS:
            reason = f"{num_deaths} workers in a row have died computing this request"
            self._emit(events.Refused(submit.request_id, reason))
            return self._end_at_once(submit, FinishReason.ERROR, reason)
        if search is None:
            # A log that was damaged may hold more of one choice than of another.
            shortest = min(map(len, outputs.values()), default=0)
            outputs = {choice: output[:shortest] for choice, output in outputs.items()}
        return self._accept(submit, outputs, ended, search, accepted, num_deaths, was_admitted)

    def remember(self, request_id: str, ended: EndedRequest) -> None:
        """A request that ended in an earlier epoch, not long ago."""
        self._remembered.add(request_id, ended, self._now_ms)

    def pin(self, pin: Pin) -> None:
        """Compute a prefix that is to stay, unless somebody asks for it before."""
        submit = self._prefixes.add(pin)
        if submit is None:
            return
        sequence = self._new_sequence(0, NO_TOKENS)
        group = self._new_group(submit, [sequence], {}, max_output=1, computes_prefix=True)
        self._prefixes.computed_by(group)
        self._by_request[submit.request_id] = group
        self._by_handle[sequence.handle] = (group, sequence)
        self._planner.queues.add_waiting(group)

    def dropped(self, group: SequenceGroup, sequence: TokenSequence) -> None:
        """The planner has ended the group that computed a prefix, which was given up."""
        del self._by_handle[sequence.handle]
        self._forget(group, FinishReason.ABORT, None)

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
        """Let a request wait for its turn, unless it can never run.

        Args:
            outputs: what the choices have that go on; None: nothing is generated yet.
            accepted: in an earlier epoch; None: now.
        """
        if submit.request_id in self._by_request:
            return []
        if search is not None and search.done:
            return self._end_with(submit, self._answers.beams_ended(submit.request_id, search))
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
        sequences = [self._new_sequence(choice, output) for choice, output in outputs.items()]
        group = self._new_group(submit, sequences, ended, max_output, accepted, search=search)
        group.num_deaths = num_deaths
        self._by_request[submit.request_id] = group
        if search is None:
            self._by_handle.update((found.handle, (group, found)) for found in sequences)
        else:
            group.handle = sequences[0].handle
        self._planner.queues.add_waiting(group)
        has_begun = bool(ended) or any(len(found.output) for found in sequences)
        group.was_admitted = was_admitted or has_begun
        self._deadlines.add(group)
        self._emit(events.Accepted(submit.request_id, num_prompt, accepted is not None))
        return [self._answers.begun(group)]

    def _end_too_long(
        self, submit: Submit, outputs: Mapping[int, IntArray], ended: Mapping[int, EndedChoice]
    ) -> list[Message]:
        """A request was recovered into a smaller context than it had."""
        if submit.sampling.beams is not None:
            reason = f"the context is now too short for its beams: {self._config.max_model_len}"
            return self._end_at_once(submit, FinishReason.ERROR, reason)
        over = {
            choice: EndedChoice(found, FinishReason.LENGTH) for choice, found in outputs.items()
        }
        return self._finished(submit, {**ended, **over})

    def _new_group(
        self,
        submit: Submit,
        sequences: list[TokenSequence],
        ended: Mapping[int, EndedChoice],
        max_output: int,
        accepted: Acceptance | None = None,
        search: BeamSearch | None = None,
        computes_prefix: bool = False,
    ) -> SequenceGroup:
        accepted = accepted or Acceptance(0, self._now_ms)
        self._last_arrival = max(self._last_arrival + 1, accepted.arrival)
        return SequenceGroup(
            submit=submit,
            arrival=self._last_arrival,
            accepted_ms=accepted.at_ms,
            max_output=max_output,
            sequences=sequences,
            ended=dict(ended),
            search=search,
            computes_prefix=computes_prefix,
        )

    def _new_sequence(self, choice: int, output: IntArray) -> TokenSequence:
        return TokenSequence(choice, self._new_handle(), output)

    # ---------------------------------------------------------- another reader

    def attach(self, attach: Attach) -> list[Message]:
        """A gateway delivers a request from here on; its client's view wins."""
        group = self._by_request.get(attach.request_id)
        if group is not None:
            return self._attach_to(group, attach)
        ended = self._remembered.find(attach.request_id)
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
        self._remembered.forget(attach.request_id)
        submit = delivered_by(attach, submit, ended)
        views = complete_views(attach, submit)
        # What was accepted before has had its turn: it may not be late for it now.
        had_turn = not attach.is_new
        if not views or submit.sampling.beams is not None:
            return self._accept(submit, None, {}, was_admitted=had_turn)
        outputs, over = continued(views)
        if not outputs:
            return self._finished(submit, over)
        if len(set(map(len, outputs.values()))) > 1:
            return self._cannot_join(submit)
        return self._accept(submit, outputs, over, was_admitted=had_turn)

    def _answer_again(self, ended: EndedRequest, attach: Attach) -> list[Message] | None:
        """What told the end of a request, if it fits what the client has."""
        message, submit = ended.message, ended.submit
        is_void = submit is not None and attach.is_void_for(submit)
        if submit is not None and not is_void:
            submit = delivered_by(attach, submit)
        if message is None and submit is not None:
            fits = not attach.exact and may_follow(ended.choices, complete_views(attach, submit))
            if not fits and not is_void:
                return None
            self._remembered.deliver(submit)
            told = submit if attach.submit is None else submit.without_prompt()
            return [self._answers.ended_choices(told, ended.choices)]
        moved = ended.attachment != attach.attachment and attach.submit is not None
        if isinstance(message, RequestEnded) and message.reason == FinishReason.ABORT and moved:
            return None  # the client came back another way, or is where it was all the time
        assert message is not None, "it ended by its choices or by a message"
        failed = isinstance(message, RequestEnded) and message.reason in FAILURES
        if submit is not None and not failed:
            self._remembered.deliver(submit)
            told = submit if attach.submit is None else submit.without_prompt()
            return [self._answers.ended_choices(told, {}), message]
        return [message]

    def _attach_to(self, group: SequenceGroup, attach: Attach) -> list[Message]:
        lacks_prompt = attach.submit is None
        if attach.is_void_for(group.submit):
            self._retention.restate(group, lacks_prompt)
            return []
        group.submit = delivered_by(attach, group.submit)
        views = complete_views(attach, group.submit)
        if attach.exact and not views:
            views = (ChoiceView(NO_TOKENS, ""),) * group.submit.num_choices
        if group.search is not None or not views:
            self._retention.restate(group, lacks_prompt)
            return []
        known = dict(group.ended)
        for sequence in group.sequences:
            known[sequence.choice] = EndedChoice(self._planner.output(sequence), "")
        if not attach.exact and may_follow(known, views):
            self._retention.restate(group, lacks_prompt)
            return []
        return self._rewind(group, views, known, attach.exact)

    def _rewind(
        self,
        group: SequenceGroup,
        views: Sequence[ChoiceView],
        known: Mapping[int, EndedChoice],
        exact: bool,
    ) -> list[Message]:
        """Go on from what the client has instead of what the log has."""
        outputs, over = continued(views, None if exact else known)
        if len(set(map(len, outputs.values()))) > 1:
            self._end_all(group, FinishReason.ERROR)
            return self._cannot_join(group.submit)
        for choice, output in list(outputs.items()):
            if len(output) >= group.max_output:
                over[choice] = EndedChoice(outputs.pop(choice), FinishReason.LENGTH)
        if not outputs:
            submit = group.submit
            self._end_all(group, FinishReason.STOP)
            return self._finished(submit, over)
        for sequence in group.sequences:
            del self._by_handle[sequence.handle]
        sequences = [self._new_sequence(choice, output) for choice, output in outputs.items()]
        self._planner.replace(group, sequences)
        self._by_handle.update((found.handle, (group, found)) for found in sequences)
        group.ended = over
        group.was_admitted |= len(sequences[0].output) > 0
        self._emit(events.Rewound(group.request_id, len(sequences[0].output)))
        return [self._answers.begun(group)]

    def _cannot_join(self, submit: Submit) -> list[Message]:
        reason = "the client has choices of different lengths, which differ from the log's"
        return self._end_at_once(submit, FinishReason.ERROR, reason)

    def _finished(self, submit: Submit, choices: Mapping[int, EndedChoice]) -> list[Message]:
        ended = EndedRequest(submit, choices, None)
        self._remembered.add(submit.request_id, ended, self._now_ms)
        return [self._answers.ended_choices(submit, choices)]

    # ----------------------------------------------------------------- endings

    def end_flagged(self, handle: int, flag: EndFlag) -> None:
        """The worker says that a sequence has ended."""
        if (found := self._by_handle.get(handle)) is not None:
            self._end(*found, flag.finish_reason())

    def finish_search(self, group: SequenceGroup) -> Message:
        """A beam search is over: all that it found at once."""
        assert group.search is not None, f"{group.request_id} has no beams"
        message = self._answers.beams_ended(group.request_id, group.search)
        self._end_search(group, FinishReason.STOP, message)
        return message

    def stop(self, stop: Stop) -> list[Message]:
        """A gateway found a stop string in a choice."""
        group = self._by_request.get(stop.request_id)
        if group is None or group.search is not None:
            return []
        prefilling = group.state is PREFILLING
        if prefilling and len(group.prefilled) < len(group.sequences):
            return []  # no choice has a token yet: nothing can have been found in it
        for sequence in group.sequences:
            if sequence.choice == stop.choice:
                if stop.num_tokens > len(self._planner.output(sequence)):
                    return []  # found in tokens that are drawn again, for somebody else
                self._end(group, sequence, FinishReason.STOP)
                break
        else:
            return []
        if group.state is ENDED:
            return [self._answers.ended(stop.request_id, FinishReason.STOP)]
        return [self._answers.stopped(stop)]

    def abort(self, abort: Abort) -> list[Message]:
        """Nobody waits for a request any more, unless another gateway delivers it now."""
        group = self._by_request.get(abort.request_id)
        if group is None:
            if self._remembered.find(abort.request_id) is None:
                # It may be on its way.
                message = self._answers.ended(abort.request_id, FinishReason.ABORT)
                ended = EndedRequest(None, {}, message, abort.attachment)
                self._remembered.add(abort.request_id, ended, self._now_ms)
            return []
        if group.submit.attachment != abort.attachment:
            return []
        return [self._end_all(group, FinishReason.ABORT)]

    def gateway_lost(self, lost: GatewayLost) -> list[Message]:
        """Nobody waits for what this gateway alone delivered."""
        return [
            self._end_all(group, FinishReason.ABORT)
            for group in self.groups()
            if group.submit.gateway == lost.gateway
        ]

    def set_clock(self, now_ms: int) -> None:
        """What comes next was said at this time; forget what has ended too long ago.

        Nothing may have been planned for longer than anything is remembered.
        """
        self._now_ms = max(self._now_ms, now_ms)
        self._remembered.expire(self._now_ms)

    def end_overdue(self, now_ms: int) -> list[Message]:
        """End what is overdue, too."""
        self.set_clock(now_ms)
        if not self._deadlines.has_passed(self._now_ms):
            return []
        return [
            self._end_all(group, FinishReason.DEADLINE, why)
            for group, why in self._deadlines.passed(self._now_ms)
        ]

    def _end(self, group: SequenceGroup, sequence: TokenSequence, reason: FinishReason) -> None:
        """Forget a sequence; what it held is free for the next plan."""
        self._planner.end_sequence(group, sequence)
        group.ended[sequence.choice] = EndedChoice(sequence.output, reason)
        del self._by_handle[sequence.handle]
        if group.state is ENDED:
            self._forget(group, reason, None)

    def _end_all(self, group: SequenceGroup, reason: FinishReason, error: str = "") -> Message:
        """All that is left of a request."""
        message = self._answers.ended(group.request_id, reason, error)
        if group.search is not None:
            self._end_search(group, reason, message)
            return message
        for sequence in reversed(list(group.sequences)):
            self._end(group, sequence, reason)
        if reason in FAILURES and not group.computes_prefix:
            ended = EndedRequest(group.submit, {}, message)
            self._remembered.add(group.request_id, ended, self._now_ms)
        return message

    def _end_search(self, group: SequenceGroup, reason: FinishReason, message: Message) -> None:
        assert group.search is not None, f"{group.request_id} has no beams"
        self._planner.end_search(group)
        self._forget(group, reason, message)

    def _end_at_once(self, submit: Submit, reason: FinishReason, error: str = "") -> list[Message]:
        """A request ends that nothing is computed of."""
        return self._end_with(submit, self._answers.ended(submit.request_id, reason, error))

    def _end_with(self, submit: Submit, message: Message) -> list[Message]:
        """This ends a request, also for who asks later."""
        ended = EndedRequest(submit, {}, message)
        self._remembered.add(submit.request_id, ended, self._now_ms)
        return [message]

    def _forget(self, group: SequenceGroup, reason: FinishReason, message: Message | None) -> None:
        """A group has ended."""
        del self._by_request[group.request_id]
        if group.computes_prefix:
            if reason is not FinishReason.ABORT:
                self._prefixes.computed(group.request_id)
            return
        self._retention.ended(group)
        ended = EndedRequest(group.submit, group.ended, message)
        self._remembered.add(group.request_id, ended, self._now_ms)
        if isinstance(message, BeamsEnded):
            num_generated = sum(len(found.tokens) for found in message.hypotheses)
        else:
            num_generated = sum(len(found.output) for found in group.ended.values())
        self._emit(events.Ended(group.request_id, reason, num_generated))
