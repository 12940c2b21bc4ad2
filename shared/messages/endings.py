"""Reasons for the end of requests, choices and sequences."""

from enum import IntEnum, StrEnum

GRAMMAR_FAILED = "the text could not follow its grammar; the worker's log names the reason"
"""The error of a request whose sequence ended with ``EndFlag.ERROR``."""


class FinishReason(StrEnum):
    """Why a choice ended; OpenAI's names where there is one."""

    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"  # the request's own, or the queue's
    OVERLOADED = "overloaded"  # never accepted: too much is waiting
    RELEASED = "released"  # it goes on in another engine, from the tokens that its client has
    UNKNOWN = "unknown"  # the request of an Attach is not remembered


class EndFlag(IntEnum):
    """How a worker marks the last token of a sequence."""

    STOP = 1
    LENGTH = 2
    ERROR = 3  # the text cannot follow its grammar

    def finish_reason(self) -> FinishReason:
        """The finish reason that this flag stands for."""
        return _REASONS[self]


_REASONS = {
    EndFlag.STOP: FinishReason.STOP,
    EndFlag.LENGTH: FinishReason.LENGTH,
    EndFlag.ERROR: FinishReason.ERROR,
}
