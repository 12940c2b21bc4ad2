"""State of the request that is explained, as far as the logs show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.messages.requests import Submit


class Phase(Enum):
    """Where the request is, as far as the logs show."""

    UNSEEN = auto()
    WAITING = auto()
    PREFILLING = auto()  # it has blocks and no row in a result yet
    RUNNING = auto()  # it has a row in every result
    PREEMPTED = auto()
    ENDED = auto()


STATUS = {
    Phase.UNSEEN: "no scheduler has answered yet",
    Phase.WAITING: "it waits for its turn",
    Phase.PREFILLING: "its tokens are being computed",
    Phase.RUNNING: "it is running",
    Phase.PREEMPTED: "it waits to get its blocks back",
    Phase.ENDED: "it has ended",
}


@dataclass(slots=True)
class TrackedChoice:
    """One choice; a beam search has one in all, for the beams that run.

    Attributes:
        handle: 0 while it is not known.
        finish_reason: "" while it runs.
    """

    handle: int
    num_tokens: int
    finish_reason: str = ""


@dataclass(slots=True)
class TrackedRequest:
    """A request with its choices.

    Args:
        block_size: of the pool, in tokens; None if not known.
    """

    block_size: int | None
    phase: Phase = Phase.UNSEEN
    submit: Submit | None = None
    choices: dict[int, TrackedChoice] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        """The gateway that delivers the request; empty if not known yet."""
        return "" if self.submit is None else self.submit.gateway

    @property
    def attachment(self) -> str:
        """The attachment of that delivery; empty if not known yet."""
        return "" if self.submit is None else self.submit.attachment

    @property
    def is_search(self) -> bool:
        """Whether it is a beam search."""
        return self.submit is not None and self.submit.sampling.beams is not None

    @property
    def is_open(self) -> bool:
        """Whether it was seen and has not ended."""
        return self.phase not in (Phase.UNSEEN, Phase.ENDED)

    @property
    def num_tokens(self) -> dict[int, int]:
        """Generated tokens by choice."""
        return {number: choice.num_tokens for number, choice in self.choices.items()}

    @property
    def has_output(self) -> bool:
        """Whether a token was generated."""
        return any(found.num_tokens for found in self.choices.values())

    def handles(self) -> list[int]:
        """Known handles of the choices that run."""
        return [c.handle for c in self.choices.values() if not c.finish_reason and c.handle]

    def has_fresh_handles(self, old: Mapping[int, TrackedChoice]) -> bool:
        """Whether a running choice has another handle than the one that was known."""
        known = {number: found.handle for number, found in old.items() if found.handle}
        return bool(known) and any(
            known.get(number) != found.handle
            for number, found in self.choices.items()
            if not found.finish_reason
        )

    def drop_handles(self) -> None:
        """Forget the handles: until the next RequestState, results show nothing of the request."""
        for choice in self.choices.values():
            choice.handle = 0
        if self.phase is Phase.RUNNING:
            self.phase = Phase.WAITING

    def num_tokens_of(self, handles: Sequence[int]) -> int:
        """Tokens of the sequences with these handles, each with its prompt."""
        num_prompt = 0 if self.submit is None else self.submit.num_prompt_tokens
        found = [choice for choice in self.choices.values() if choice.handle in handles]
        return sum(num_prompt + choice.num_tokens for choice in found)

    def num_tokens_in_all(self) -> int:
        """Tokens of all sequences that run."""
        return self.num_tokens_of(self.handles())

    def kind_of_return(self, handles: Sequence[int], computed: Sequence[int]) -> str:
        """The kind of its preemption, in words, from the tokens that it came back with."""
        missing = [self.num_tokens_of([h]) - n for h, n in zip(handles, computed, strict=True)]
        if any(number != 1 for number in missing):
            return "so it had given its blocks up (recompute)"
        size = self.block_size
        if size is not None and any(number % size for number in computed):
            return "so it had been swapped out (swap)"
        return "swapped out, or all found in the prefix cache: that is not certain"
