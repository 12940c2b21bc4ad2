"""What Redis keeps of a batch."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from shared.codec import IntArray, Message, message


class Status(StrEnum):
    """How far a batch has come, as OpenAI has it."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a file cannot be a batch.

    Attributes:
        line: number of the line, from 1; None: the whole file.
        param: field of the line.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Of lines that are not blank, and what their answers used."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Which lines of the input have an answer or an error.

    Attributes:
        line: number of the first that has none, from 0.
        piece, offset: where it begins: the number of a piece of the file, and bytes in it.
        done: numbers of later ones that have one.
    """

    line: int
    piece: int
    offset: int
    done: IntArray  # [num_done_ahead]


START_OF_FILE = Progress(0, 1, 0, np.empty(0, np.int32))


@message
@dataclass(frozen=True, slots=True, eq=False)
class BatchState(Message):
    """All that is known of a batch.

    Attributes:
        id: as clients have it.
        metadata: as JSON.
        window: as the client gave it.
        retention_s: so long it and its files are kept after its end.
        ends_as: EXPIRED or CANCELLED for a batch whose other lines are not answered.
        models: that its lines name, of those that were served when they were checked.
        output_file, error_file: ids; clients can find a file from the end of the batch on.
        ..._s: when it came so far, seconds since 1970; 0: it did not.
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    window: str
    metadata: str
    created_s: int
    expires_s: int
    retention_s: int
    status: str = Status.VALIDATING
    ends_as: str = Status.COMPLETED
    in_progress_s: int = 0
    finalizing_s: int = 0
    cancelling_s: int = 0
    ended_s: int = 0
    errors: tuple[LineError, ...] = ()
    counts: Counts = Counts()
    progress: Progress = START_OF_FILE
    output_bytes: int = 0
    error_bytes: int = 0
    models: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Nothing of it changes any more."""
        return self.status in ENDED

    @property
    def counted_until_s(self) -> int:
        """So long its bytes count for the API key."""
        return self.expires_s + self.retention_s

    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": self._shown_errors(),
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": str(self.status),
            "output_file_id": self._shown_file(self.output_file, self.output_bytes),
            "error_file_id": self._shown_file(self.error_file, self.error_bytes),
            "created_at": self.created_s,
            "in_progress_at": self.in_progress_s or None,
            "expires_at": self.expires_s,
            "finalizing_at": self.finalizing_s or None,
            "completed_at": self._ended_as(Status.COMPLETED),
            "failed_at": self._ended_as(Status.FAILED),
            "expired_at": self._ended_as(Status.EXPIRED),
            "cancelling_at": self.cancelling_s or None,
            "cancelled_at": self._ended_as(Status.CANCELLED),
            "request_counts": {
                "total": self.counts.total,
                "completed": self.counts.completed,
                "failed": self.counts.failed,
            },
            "usage": self._shown_usage(),
            "metadata": json.loads(self.metadata),
        }

    def _shown_errors(self) -> dict[str, Any] | None:
        if not self.errors:
            return None
        data = [
            {"code": error.code, "line": error.line, "message": error.message, "param": error.param}
            for error in self.errors
        ]
        return {"object": "list", "data": data}

    def _shown_file(self, file_id: str, num_bytes: int) -> str | None:
        return file_id if self.has_ended and num_bytes else None

    def _ended_as(self, status: Status) -> int | None:
        return self.ended_s if self.status == status else None

    def _shown_usage(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
