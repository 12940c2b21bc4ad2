"""Events of the outputs log, in its order, as ``OutputsReader`` makes them.

Messages that need no preparation are events themselves. Handles are valid within an epoch only, and
only while nothing is missing: after an EpochStarted, a Gap or a Damaged a reader drops the handles
that it has, and takes new ones from the RequestStates that follow.
"""

from dataclasses import dataclass

from shared.bus.api import EntryId
from shared.messages.endings import FinishReason
from shared.messages.outputs import OutputsMessage, StepResult
from shared.messages.plans import EpochStarted


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries or results are missing here: later tokens do not continue earlier ones.

    Attributes:
        missing_steps: steps without a result, half-open; None if that is not known.
    """

    why: str
    missing_steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Damaged:
    """A message that cannot be decoded, is inconsistent, or does not belong in ``outputs``."""

    at: EntryId
    error: str


@dataclass(slots=True)
class Step:
    """The result of the next step; a row is a sequence that got a token.

    Attributes:
        handles: by row, all different.
        tokens: by row.
        ends: by row, of the sequences whose token is their last.
    """

    result: StepResult
    handles: list[int]
    tokens: list[int]
    ends: dict[int, FinishReason]

    def admissions(self) -> list[tuple[int, int]]:
        """Handles of admitted sequences, with the tokens that needed no computation."""
        result = self.result
        handles, computed = result.admitted_handles.tolist(), result.admitted_computed.tolist()
        return list(zip(handles, computed, strict=True))


OutputsEvent = EpochStarted | Gap | Damaged | Step | OutputsMessage
