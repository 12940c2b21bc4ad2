"""Messages of the outputs log about requests: their states, and how they ended."""

from collections.abc import Mapping
from operator import attrgetter

from scheduler_svc.core.requests.ended_requests import EndedChoice
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step.planner import StepPlanner
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, ChoiceState, RequestEnded, RequestState
from shared.messages.requests import Stop, Submit


class Answers:
    """Makes messages for gateways; each has the last entry of ``requests`` that was applied.

    Args:
        planner: has the tokens that sequences have generated.
        cursor: last entry of ``requests`` that was applied.

    Attributes:
        cursor: the same; `Scheduler` advances it.
    """

    def __init__(self, planner: StepPlanner, cursor: EntryId) -> None:
        self.cursor = cursor
        self._planner = planner

    def begun(self, group: SequenceGroup) -> RequestState:
        """State of a request that was just accepted or has new handles."""
        return self._state(group, self._planner.planned_step, with_prompt=group.state_id is None)

    def state(self, group: SequenceGroup, with_prompt: bool = True) -> RequestState:
        """State of a request that has its handles already.

        Args:
            with_prompt: whether no entry that is kept has the prompt, or a reader needs it.
        """
        return self._state(group, self._planner.applied_step, with_prompt)

    def ended_choices(self, submit: Submit, choices: Mapping[int, EndedChoice]) -> RequestState:
        """State of a request whose choices have all ended, or that ends by the next message.

        Args:
            submit: without its prompt where the attaching gateway has it.
        """
        found = sorted(_states(choices), key=attrgetter("choice"))
        step = self._planner.planned_step
        return RequestState(submit, tuple(found), str(self.cursor), step=step)

    def ended(self, request_id: str, reason: FinishReason, error: str = "") -> RequestEnded:
        """End of a request, with all of its choices that have not ended."""
        return RequestEnded(request_id, reason, error, str(self.cursor))

    def stopped(self, stop: Stop) -> ChoiceEnded:
        """End of one choice at a gateway's Stop; others continue."""
        return ChoiceEnded(stop.request_id, stop.choice, FinishReason.STOP, str(self.cursor))

    def beams_ended(self, request_id: str, search: BeamSearch) -> Message:
        """End of a beam search, with its hypotheses."""
        hypotheses, width = search.hypotheses(), search.params.width
        if len(hypotheses) < width:
            error = f"the model's logits allow {len(hypotheses)} of {width} beams"
            return self.ended(request_id, FinishReason.ERROR, error)
        return BeamsEnded(request_id, hypotheses, str(self.cursor))

    def _state(self, group: SequenceGroup, step: int, with_prompt: bool) -> RequestState:
        if group.search is not None:
            choices = group.search.choices(group.handle)
        else:
            choices = [
                ChoiceState(found.choice, found.handle, self._planner.output(found), "")
                for found in group.sequences
            ]
            choices += _states(group.ended)
            choices.sort(key=attrgetter("choice"))
        return RequestState(
            group.submit if with_prompt else group.submit.without_prompt(),
            tuple(choices),
            str(self.cursor),
            group.num_deaths,
            group.was_admitted,
            step,
            group.arrival,
            group.accepted_ms,
        )


def _states(choices: Mapping[int, EndedChoice]) -> list[ChoiceState]:
    return [ChoiceState(choice, 0, found.output, found.reason) for choice, found in choices.items()]
