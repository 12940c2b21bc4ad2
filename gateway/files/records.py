"""What Redis keeps of a file."""

from dataclasses import dataclass
from typing import Any

from shared.codec import Message, message

FOR_BATCH, OF_BATCH = "batch", "batch_output"


@message
@dataclass(frozen=True, slots=True, eq=False)
class FileInfo(Message):
    """A complete file.

    Attributes:
        id: as clients have it.
        purpose: FOR_BATCH or OF_BATCH.
        created_s, expires_s: seconds since 1970.
        counted_until_s: so long its bytes count for the API key, unless it is deleted.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int
    counted_until_s: int

    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@message
@dataclass(frozen=True, slots=True, eq=False)
class FilePiece(Message):
    """Bytes of a file that follow those of the piece before."""

    data: bytes
