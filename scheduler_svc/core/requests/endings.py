"""Ends requests: by their tokens, by clients and gateways, and when they are overdue."""

from collections.abc import Callable, Mapping

from scheduler_svc.core import events
from scheduler_svc.core.blocks.pinned_prefixes import PinnedPrefixes
from scheduler_svc.core.requests.ended_requests import FAILURES, EndedChoice, EndedRequest
from scheduler_svc.core.requests.known_requests import KnownRequests
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.requests.request_states import Answers
from scheduler_svc.core.sequences.backlog import Deadlines
from scheduler_svc.core.sequences.sequence import ENDED, PREFILLING, Sequence, SequenceGroup
from scheduler_svc.core.step.planner import StepPlanner
from shared.codec import Message
from shared.messages.endings import GRAMMAR_FAILED, EndFlag, FinishReason
from shared.messages.outputs import BeamsEnded
from shared.messages.requests import Abort, GatewayLost, Stop, Submit


class Endings:
    """Ends sequences and groups, and remembers how.

    Args:
        known: all requests.
        deadlines: of those that have not ended.
        planner: takes their blocks and slots back.
        prefixes: pinned ones.
        retention: decides how far the outputs log may be trimmed.
        answers: makes the messages for gateways.
        emit: takes each event.
    """

    def __init__(
        self,
        known: KnownRequests,
        deadlines: Deadlines,
        planner: StepPlanner,
        prefixes: PinnedPrefixes,
        retention: Retention,
        answers: Answers,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._known = known
        self._deadlines = deadlines
        self._planner = planner
        self._prefixes = prefixes
        self._retention = retention
        self._answers = answers
        self._emit = emit

    def end_flagged(self, handle: int, flag: EndFlag) -> list[Message]:
        """End a sequence whose last token the worker has flagged; after an error, its request."""
        if (found := self._known.by_handle.get(handle)) is None:
            return []
        if flag is EndFlag.ERROR:
            return [self.end_all(found[0], FinishReason.ERROR, GRAMMAR_FAILED)]
        self._end(*found, flag.finish_reason())
        return []

    def finish_search(self, group: SequenceGroup) -> Message:
        """End a beam search that is done; the message with all its hypotheses."""
        assert group.search is not None, f"{group.request_id} has no beams"
        message = self._answers.beams_ended(group.request_id, group.search)
        self._end_search(group, FinishReason.STOP, message)
        return message

    def remove_dropped(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Forget a group that the planner has ended because its prefix was given up."""
        del self._known.by_handle[sequence.handle]
        self._remove(group, FinishReason.ABORT, None)

    def stop(self, stop: Stop) -> list[Message]:
        """End a choice in which a gateway found a stop string."""
        group = self._known.by_request.get(stop.request_id)
        if group is None or group.search is not None:
            return []
        if group.state is PREFILLING and len(group.prefilled) < len(group.sequences):
            return []  # no choice has a token yet: the gateway found it in another history
        for sequence in group.sequences:
            if sequence.choice == stop.choice:
                if stop.num_tokens > len(self._planner.output(sequence)):
                    return []  # the tokens in which it was found are sampled again
                self._end(group, sequence, FinishReason.STOP)
                break
        else:
            return []
        if group.state is ENDED:
            return [self._answers.ended(stop.request_id, FinishReason.STOP)]
        return [self._answers.stopped(stop)]

    def abort(self, abort: Abort) -> list[Message]:
        """End a request, unless another gateway delivers it now."""
        group = self._known.by_request.get(abort.request_id)
        if group is None:
            if self._known.remembered.find(abort.request_id) is None:
                # Its Submit may still come.
                message = self._answers.ended(abort.request_id, FinishReason.ABORT)
                ended = EndedRequest(None, {}, message, abort.attachment)
                self._known.remembered.add(abort.request_id, ended, self._known.now_ms)
            return []
        if group.submit.attachment != abort.attachment:
            return []
        return [self.end_all(group, FinishReason.ABORT)]

    def gateway_lost(self, lost: GatewayLost) -> list[Message]:
        """End all requests that a dead gateway delivered."""
        return [
            self.end_all(group, FinishReason.ABORT)
            for group in list(self._known.by_request.values())
            if group.submit.gateway == lost.gateway
        ]

    def end_overdue(self, now_ms: int) -> list[Message]:
        """Advance the clock, and end requests that are past their deadlines."""
        self._known.set_clock(now_ms)
        if not self._deadlines.has_passed(self._known.now_ms):
            return []
        return [
            self.end_all(group, FinishReason.DEADLINE, why)
            for group, why in self._deadlines.passed(self._known.now_ms)
        ]

    def _end(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; its blocks are free for the next plan."""
        self._planner.end_sequence(group, sequence)
        group.ended[sequence.choice] = EndedChoice(sequence.output, reason)
        del self._known.by_handle[sequence.handle]
        if group.state is ENDED:
            self._remove(group, reason, None)

    def end_all(self, group: SequenceGroup, reason: FinishReason, error: str = "") -> Message:
        """End all sequences of a request."""
        message = self._answers.ended(group.request_id, reason, error)
        if group.search is not None:
            self._end_search(group, reason, message)
            return message
        for sequence in reversed(list(group.sequences)):
            self._end(group, sequence, reason)
        if reason in FAILURES and not group.computes_prefix:
            ended = EndedRequest(group.submit, {}, message)
            self._known.remembered.add(group.request_id, ended, self._known.now_ms)
        return message

    def release_all(self) -> list[Message]:
        """End all requests here: other engines go on with them. No plan may be in flight."""
        released: list[Message] = []
        for group in list(self._known.by_request.values()):
            if not group.computes_prefix:
                released.append(self.end_all(group, FinishReason.RELEASED))
                self._known.remembered.forget(group.request_id)
        return released

    def _end_search(self, group: SequenceGroup, reason: FinishReason, message: Message) -> None:
        assert group.search is not None, f"{group.request_id} has no beams"
        self._planner.end_search(group)
        self._remove(group, reason, message)

    def end_unstarted(self, submit: Submit, reason: FinishReason, error: str = "") -> list[Message]:
        """End a request of which nothing is computed."""
        return self.end_with(submit, self._answers.ended(submit.request_id, reason, error))

    def end_with(self, submit: Submit, message: Message) -> list[Message]:
        """End a request of which nothing is computed with this message, and remember it."""
        ended = EndedRequest(submit, {}, message)
        self._known.remembered.add(submit.request_id, ended, self._known.now_ms)
        return [message]

    def end_by_choices(self, submit: Submit, choices: Mapping[int, EndedChoice]) -> list[Message]:
        """End a request of which nothing is computed: all its choices have ended."""
        ended = EndedRequest(submit, choices, None)
        self._known.remembered.add(submit.request_id, ended, self._known.now_ms)
        return [self._answers.ended_choices(submit, choices)]

    def _remove(self, group: SequenceGroup, reason: FinishReason, message: Message | None) -> None:
        """Remember a group that has ended."""
        del self._known.by_request[group.request_id]
        if group.computes_prefix:
            if reason is not FinishReason.ABORT:
                self._prefixes.computed(group.request_id)
            return
        self._retention.ended(group)
        ended = EndedRequest(group.submit, group.ended, message)
        self._known.remembered.add(group.request_id, ended, self._known.now_ms)
        if isinstance(message, BeamsEnded):
            num_generated = sum(len(found.tokens) for found in message.hypotheses)
        else:
            num_generated = sum(len(found.output) for found in group.ended.values())
        tenant = group.submit.tenant
        self._emit(events.Ended(group.request_id, reason, num_generated, tenant))
