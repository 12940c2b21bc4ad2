"""Reasons for the end of requests, choices and sequences."""

from enum import IntEnum, StrEnum


class FinishReason(StrEnum):
    """Why a choice ended; OpenAI's names where there is one."""

    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"  # the request's own, or the queue's
    OVERLOADED = "overloaded"  # never accepted: too much is waiting
    UNKNOWN = "unknown"  # the request of an Attach is not remembered


class EndFlag(IntEnum):
    """How a worker marks the last token of a sequence."""

    STOP = 1
    LENGTH = 2

    def finish_reason(self) -> FinishReason:
        """The finish reason that this flag stands for."""
        return FinishReason.STOP if self is EndFlag.STOP else FinishReason.LENGTH
