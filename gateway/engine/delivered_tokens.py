"""The tokens delivered of a request, which the log must continue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.messages.outputs import ChoiceState, RequestState
from shared.messages.requests import ChoiceView, attachment_of, delivery_of


@dataclass(slots=True)
class DeliveredChoice:
    """The tokens delivered of one choice.

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
        """The same as an Attach has it."""
        return ChoiceView(np.array(self.tokens, np.int32), self.finish_reason)


@dataclass(slots=True)
class DeliveredRequest:
    """A request that a call waits for.

    Attributes:
        delivery: prefix of the names of all its attachments.
        attachment: the one that the next valid RequestState names.
        awaits: the log is ignored until a RequestState names ``attachment``.
        is_search: a beam search, of which nothing is delivered until it is over.
        group: handle of the beams that run.
        was_stated: a RequestState was read.
        num_attached: Attach messages sent so far.
        overtaken: deliveries that were replaced, by the last RequestState.
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
        """Whether another delivery has replaced this one for good."""
        if delivery_of(state.submit.attachment) == self.delivery:
            return False
        return not self.awaits or self.delivery in state.submit.overtaken

    def attach(self) -> None:
        """Name a new attachment; only a state that names it is valid."""
        self.num_attached += 1
        self.attachment = attachment_of(self.delivery, self.num_attached)
        self.awaits = True

    @property
    def has_ended(self) -> bool:
        """Nothing more will be delivered."""
        return all(choice.ended for choice in self.choices)

    def views(self) -> tuple[ChoiceView, ...]:
        """The tokens that the client has; none for a beam search, whose beams are not delivered."""
        return () if self.is_search else tuple(choice.view() for choice in self.choices)

    def begin_with(self, views: Sequence[ChoiceView]) -> None:
        """Begin with the tokens that the client has."""
        for choice, view in zip(self.choices, views, strict=True):
            choice.tokens = view.tokens.tolist()
            choice.finish_reason = view.finish_reason
            self.was_admitted = self.was_admitted or bool(choice.tokens)

    def lacks_scores(self, found: Mapping[int, Sequence[int]]) -> bool:
        """Whether new tokens need log-probabilities, which no state has.

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
