"""What was delivered of a request: the view of it that the log must fit."""

from dataclasses import dataclass, field

from shared.messages import ChoiceState


@dataclass(slots=True)
class DeliveredChoice:
    """What was delivered of one choice."""

    request_id: str
    index: int
    scored: bool  # its tokens come with log-probabilities
    tokens: list[int] = field(default_factory=list)
    handle: int | None = None
    ended: bool = False

    def continuation(self, known: ChoiceState) -> list[int] | None:
        """Tokens of the log that were not delivered yet, None if the delivered ones differ."""
        output: list[int] = known.output.tolist()
        have = len(self.tokens)
        if output[:have] != self.tokens:
            return None
        # Log-probabilities are not part of a state: without them the tokens are not what was
        # asked for.
        return None if self.scored and len(output) > have else output[have:]


@dataclass(slots=True)
class DeliveredRequest:
    """A request that somebody waits for.

    Attributes:
        is_search: a beam search, of which nothing is delivered until it is over.
        group: handle of the beams that run.
        was_stated: the log knew the request.
    """

    choices: list[DeliveredChoice]
    is_search: bool = False
    group: int | None = None
    was_stated: bool = False
    was_admitted: bool = False

    @property
    def has_ended(self) -> bool:
        """Nothing more will be delivered."""
        return all(choice.ended for choice in self.choices)
