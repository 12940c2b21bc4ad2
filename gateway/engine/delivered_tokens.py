"""What was delivered of a request: the view of it that the log must fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.messages.outputs import ChoiceState, RequestState
from shared.messages.requests import ChoiceView, attachment_of, delivery_of


@dataclass(slots=True)
class DeliveredChoice:
    """What was delivered of one choice.

    Attributes:
        finish_reason: "" while more is to come.
    """

    request_id: str
    index: int
    scored: bool  # its tokens come with log-probabilities
    tokens: list[int] = field(default_factory=list)
    handle: int | None = None
    finish_reason: str = ""

    @property
    def ended(self) -> bool:
        """Nothing more will be delivered."""
        return bool(self.finish_reason)

    def continuation(self, known: ChoiceState) -> list[int] | None:
        """Tokens of the log that were not delivered yet, None if the delivered ones differ."""
        output: list[int] = known.output.tolist()
        have = len(self.tokens)
        return output[have:] if output[:have] == self.tokens else None

    def view(self) -> ChoiceView:
        """As the scheduler is told of it."""
        return ChoiceView(np.array(self.tokens, np.int32), self.finish_reason)


@dataclass(slots=True)
class DeliveredRequest:
    """A request that somebody waits for.

    Attributes:
        delivery: what all its attachments' names begin with.
        attachment: name of this delivery by which the log knows it, or is to know it.
        awaits: the log can't be followed before it answers to ``attachment``.
        is_search: a beam search, of which nothing is delivered until it is over.
        group: handle of the beams that run.
        was_stated: the log knew the request.
        num_attached: how often it has been asked for again.
        overtaken: deliveries that it was taken over from, as the log said when it last answered.
    """

    choices: list[DeliveredChoice]
    delivery: str
    attachment: str
    is_search: bool = False
    awaits: bool = False
    group: int | None = None
    was_stated: bool = False
    was_admitted: bool = False
    num_attached: int = 0
    overtaken: tuple[str, ...] = ()

    def is_overtaken_in(self, state: RequestState) -> bool:
        """Another delivery has the request now, and this one will not get it back."""
        if delivery_of(state.submit.attachment) == self.delivery:
            return False
        return not self.awaits or self.delivery in state.submit.overtaken

    def attach(self) -> None:
        """Ask for the request again: only an answer to that can be believed."""
        self.num_attached += 1
        self.attachment = attachment_of(self.delivery, self.num_attached)
        self.awaits = True

    @property
    def has_ended(self) -> bool:
        """Nothing more will be delivered."""
        return all(choice.ended for choice in self.choices)

    def views(self) -> tuple[ChoiceView, ...]:
        """What the client has. Of beams it is no part of what the engine searches with."""
        return () if self.is_search else tuple(choice.view() for choice in self.choices)

    def begin_with(self, views: Sequence[ChoiceView]) -> None:
        """The client has this already."""
        for choice, view in zip(self.choices, views, strict=True):
            choice.tokens = view.tokens.tolist()
            choice.finish_reason = view.finish_reason
            self.was_admitted = self.was_admitted or bool(choice.tokens)

    def lacks_scores(self, found: Mapping[int, Sequence[int]]) -> bool:
        """Some of what is new must have log-probabilities, which no state has.

        Args:
            found: by choice, what ``continuations`` has found.
        """
        return any(more and self.choices[index].scored for index, more in found.items())

    def continuations(self, state: RequestState) -> dict[int, list[int]] | str:
        """Tokens that are new, by choice that goes on, or why the state can't be followed."""
        known = {choice.choice: choice for choice in state.choices}
        if sorted(known) != list(range(len(self.choices))) or len(state.choices) != len(known):
            return "the log has other choices of this request"
        found: dict[int, list[int]] = {}
        for choice in self.choices:
            if choice.ended:
                continue
            more = choice.continuation(known[choice.index])
            if more is None:
                return "the log has another history of this request"
            found[choice.index] = more
        return found
