"""What Redis keeps of a response: the messages of its log."""

from dataclasses import dataclass

from shared.codec import IntArray, Message, message
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit

CANCELLED, DELETED = "cancelled", "deleted"


@message
@dataclass(frozen=True, slots=True, eq=False)
class ResponseAsked(Message):
    """The first entry: what was asked.

    Attributes:
        id: as clients have it.
        body: of the call, as JSON.
        created_s: seconds since 1970.
        submit: what the engine is asked for; of the prompt and the grammar no more is left than
            reading the answer needs, once the engine has been asked for the last time.
    """

    id: str
    tenant: str
    body: bytes
    created_s: int
    submit: Submit


@message
@dataclass(frozen=True, slots=True, eq=False)
class ResponseClaimed(Message):
    """A gateway finishes the response from here on."""

    instance: str


@message
@dataclass(frozen=True, slots=True, eq=False)
class ResponseTokens(Message):
    """More tokens of the answer, with a log-probability for each or none at all."""

    tokens: IntArray  # [num_tokens]
    logprobs: tuple[TokenLogprobs, ...] = ()


@message
@dataclass(frozen=True, slots=True, eq=False)
class ResponseEnded(Message):
    """The last entry.

    Attributes:
        reason: a FinishReason, CANCELLED or DELETED.
        error, code: of an answer that failed.
    """

    reason: str
    ended_s: int
    cached_tokens: int = 0
    error: str = ""
    code: str = ""
