"""Messages of ``{E}:requests``, from gateways to the scheduler.

The scheduler writes GatewayLost and Drain itself.
"""

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from shared.codec import IntArray, Message, message
from shared.sampling import SamplingParams


def attachment_of(delivery: str, number: int) -> str:
    """The name of a delivery's attachment number ``number``."""
    return f"{delivery}.{number}"


def delivery_of(attachment: str) -> str:
    """The delivery of an attachment: the part of the name that all its attachments share."""
    return attachment.partition(".")[0]


@message
@dataclass(frozen=True, slots=True, eq=False)
class Submit(Message):
    """A request that a gateway accepted.

    A prompt is written once: where a reader already has it, the message has its digest instead.
    """

    request_id: str  # random 128 bit, hex
    gateway: str  # instance that streams the answer
    attachment: str  # names this delivery, see ``delivery_of``; an Abort must repeat it
    prompt: IntArray  # [num_prompt_tokens]; empty where there is a digest instead
    sampling: SamplingParams
    received_ms: int  # the gateway's wall clock
    num_choices: int  # continuations of the prompt, sampled independently, or beams
    priority: int  # lower is served first; equal ones in the order of arrival
    cache_salt: str  # prefixes are shared only between requests with the same salt
    tenant: str = ""  # name of the API key; limits on waiting requests apply to each tenant
    deadline_ms: int = 0  # by the same clock; generation ends then; 0: no deadline
    display: bytes = b""  # how the answer is shown, for a gateway that takes the request over
    overtaken: tuple[str, ...] = ()  # former deliveries; filled in by the scheduler
    prompt_digest: bytes = b""  # of a prompt that is left out
    omitted_tokens: int = 0  # length of a prompt that is left out; 0: not known
    traceparent: str = ""  # the span of its call (W3C Trace Context); "": it has none

    @property
    def lacks_prompt(self) -> bool:
        """Whether there is only a digest of the prompt."""
        return self.prompt_digest != b""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, also of one that is left out; 0 if that is not known."""
        return len(self.prompt) or self.omitted_tokens

    @property
    def trace_id(self) -> str:
        """The trace of its call; "" if it has none."""
        return self.traceparent.partition("-")[2].partition("-")[0]

    def without_prompt(self) -> "Submit":
        """A copy with the prompt's digest instead of the prompt."""
        if self.lacks_prompt:
            return self
        return replace(
            self,
            prompt=np.empty(0, np.int32),
            prompt_digest=_digest(self.prompt),
            omitted_tokens=len(self.prompt),
        )

    def with_prompt(self, prompt: IntArray) -> "Submit | None":
        """A copy with this prompt [num_tokens]; None if the one left out has another digest."""
        if _digest(prompt) != self.prompt_digest:
            return None
        return replace(self, prompt=prompt, prompt_digest=b"", omitted_tokens=0)

    def with_prompt_of(self, known: "Submit | None") -> "Submit | None":
        """A copy with the prompt of ``known``; None if that prompt has another digest."""
        if not self.lacks_prompt:
            return self
        if known is None or known.lacks_prompt:
            return None
        return self.with_prompt(known.prompt)


def _digest(prompt: IntArray) -> bytes:
    return blake2b(prompt.astype("<i4", copy=False).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ChoiceView:
    """The tokens of one choice that a client has received."""

    tokens: IntArray  # [num_generated]
    finish_reason: str  # "" while the choice runs


@message
@dataclass(frozen=True, slots=True, eq=False)
class Attach(Message):
    """A gateway delivers a request from here on, and reports the tokens that its client has.

    A gateway sends it when it takes over a stream, when it cannot follow the log any more, and when
    it is unknown whether its Submit arrived. The client's view wins: if the client has more tokens
    than the log, or other ones, the request continues from the client's. The answer is a
    RequestState, or the message that ended the request. If another delivery has taken the request
    over since, the Attach is void, and the answer is the unchanged state.

    A Submit without its prompt suffices if the scheduler has the request. Otherwise the answer is
    that the request is unknown, and the gateway sends the whole Submit.
    """

    request_id: str
    gateway: str  # instance that streams the answer from now on
    attachment: str  # names this delivery; earlier ones cannot abort any more
    submit: Submit | None  # None: the gateway has only the id
    views: tuple[ChoiceView, ...]  # by choice; empty: nothing was delivered
    exact: bool  # continue from the views even if the log has more, as it has no log-probabilities
    is_new: bool = False  # no acceptance was read: the request may still be refused
    reads_prompts: bool = False  # the answer may refer to the prompts log

    @property
    def must_have_prompt(self) -> bool:
        """Whether the answer must have the prompt itself: the gateway reads one log alone."""
        return self.submit is None and not self.reads_prompts

    def is_void_for(self, submit: Submit) -> bool:
        """Whether another delivery has taken the request over from this one.

        Args:
            submit: of the request, from the scheduler's state.
        """
        delivery = delivery_of(self.attachment)
        return delivery != delivery_of(submit.attachment) and delivery in submit.overtaken


@message
@dataclass(frozen=True, slots=True, eq=False)
class GatewayLost(Message):
    """A gateway's lease expired: requests that only it delivered end. Sent by the scheduler."""

    gateway: str


@message
@dataclass(frozen=True, slots=True, eq=False)
class Drain(Message):
    """The scheduler of this epoch shuts down and admits no further request. Sent by itself."""

    epoch: int
    hand_over: bool = False  # unfinished requests are released, for other engines


@message
@dataclass(frozen=True, slots=True, eq=False)
class Stop(Message):
    """The gateway found a stop string: the choice ends with ``num_tokens`` generated tokens."""

    request_id: str
    choice: int
    num_tokens: int


@message
@dataclass(frozen=True, slots=True, eq=False)
class Abort(Message):
    """A delivery has ended: no client waits for the request."""

    request_id: str
    attachment: str  # a stale one is ignored
    reason: str


@message
@dataclass(frozen=True, slots=True, eq=False)
class Pin(Message):
    """Pins a prefix of the operator's: its keys and values stay in the pool.

    There is no answer: EngineInfo has the status. Repetitions have no effect.
    """

    prefix_id: str  # equal for equal tokens and salts, whichever gateway sends them
    name: str  # for logs
    tokens: IntArray  # [num_tokens]
    cache_salt: str  # only requests with the same salt begin with it
