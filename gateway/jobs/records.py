"""Messages of the queues of jobs, and of lists of what is kept."""

from dataclasses import dataclass

from shared.codec import Message, message

MOST_QUEUED = 10_000  # jobs of one kind, of all API keys


@message
@dataclass(frozen=True, slots=True, eq=False)
class QueuedJob(Message):
    """A job that may not have ended."""

    id: str
    tenant: str


@message
@dataclass(frozen=True, slots=True, eq=False)
class KeptName(Message):
    """One of the things that an API key keeps."""

    id: str
