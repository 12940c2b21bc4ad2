"""Events of the requests that a gateway delivers, as made from the outputs log."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import RequestState
from shared.messages.requests import Submit


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """More tokens of one choice."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, or none at all


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a run of prompt tokens; a later run replaces an earlier one."""

    request_id: str
    positions: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """The number of a request's tokens found in the prefix cache at its first admission."""

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
    """The log holds the request: from here on it is finished, whichever process dies."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No more will come for this request."""

    request_id: str
    error: str
    ended_in_engine: bool  # False: the engine may still be generating, and needs an Abort
    overloaded: bool = False  # refused; it may be accepted if it is sent again
    for_all: bool = False  # overloaded: any other request would be refused now, too


@dataclass(frozen=True, slots=True)
class Desynchronized:
    """The log does not continue the delivered tokens: the gateway must attach again."""

    request_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Attached:
    """The engine has answered an Attach: later events continue the delivered tokens."""

    request_id: str
    submit: Submit  # as the engine has it
    outputs: tuple[tuple[int, ...], ...] = ()  # tokens by choice, for a look-up only
    finish_reasons: tuple[str, ...] = ()  # by choice, for a look-up only


@dataclass(frozen=True, slots=True)
class UnknownRequest:
    """The engine has no request of this id, or has forgotten it."""

    request_id: str
    may_be_elsewhere: bool = False  # the engine did not end it: another one may go on with it


@dataclass(frozen=True, slots=True)
class PromptMissing:
    """The engine has no prompt for a request that was attached to; the gateway must send it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PromptInLog:
    """The state that answers a look-up refers to the prompts log."""

    request_id: str
    state: RequestState


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another delivery of the same request has taken over from this one."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Released:
    """The engine hands the request over: it goes on in another engine."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EngineUnreachable:
    """The engine did not answer in time."""

    request_id: str
    why: str


Event = (
    RequestAccepted
    | TokensArrived
    | PromptScored
    | PrefixFound
    | ChoiceFinished
    | RequestFailed
    | Desynchronized
    | Attached
    | UnknownRequest
    | PromptMissing
    | PromptInLog
    | Superseded
    | Released
    | EngineUnreachable
)
