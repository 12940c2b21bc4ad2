"""What the outputs log means for the requests that a gateway waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """More of one choice."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, or none at all


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a run of prompt tokens; a later one replaces an earlier one."""

    request_id: str
    positions: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """So much of a request's tokens lay in the prefix cache when it was first admitted."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The engine generates no more of this choice."""

    request_id: str
    choice: int
    reason: FinishReason
    beam_score: float | None = None  # by which a beam search ranked it


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """The log holds the request: from here on it is finished, whoever dies."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No more will come for this request."""

    request_id: str
    error: str
    engine_knows: bool  # False: the engine may still be generating, and must be told
    overloaded: bool = False  # it was never accepted, and may be if it is sent again
    for_all: bool = False  # overloaded: nobody else's would be accepted now, either


@dataclass(frozen=True, slots=True)
class FollowingLost:
    """The log and what was delivered don't fit together: the request must be attached to anew."""

    request_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The engine has answered to an attachment; what follows continues what was delivered."""

    request_id: str
    submit: Submit  # as the engine knows it
    outputs: tuple[tuple[int, ...], ...] = ()  # by choice, if the request was only looked up
    finish_reasons: tuple[str, ...] = ()  # likewise


@dataclass(frozen=True, slots=True)
class NotRemembered:
    """The engine does not know the request, or no more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PromptMissing:
    """The engine does not have a request that is attached to: it needs all of it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another delivery of the same request has taken over."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EngineUnreachable:
    """The request was waited for in vain, since nothing could be said to the engine."""

    request_id: str
    why: str


Event = (
    RequestAccepted
    | TokensArrived
    | PromptScored
    | PrefixFound
    | ChoiceFinished
    | RequestFailed
    | FollowingLost
    | Joined
    | NotRemembered
    | PromptMissing
    | Superseded
    | EngineUnreachable
)
