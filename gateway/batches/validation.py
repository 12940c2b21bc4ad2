"""Checks the file of a batch, before any of its lines is answered."""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from gateway.batches.body import BatchLine, parse_line
from gateway.batches.line_reader import Line, read_lines
from gateway.batches.records import START_OF_FILE, BatchState, LineError
from gateway.files.store import FileStore
from gateway.http.errors import ApiError
from gateway.http.request_bodies import BodyReader
from gateway.models.model_table import ModelTable

CALLER = "batches"  # by which threads are shared: with interactive calls, not with their keys
_MOST_ERRORS = 50
_MOST_MESSAGE_CHARS = 400
_LINES_AT_ONCE = 50  # some 20 us each
_AROUND_BODY_BYTES = 4096
_MOST_MODELS = 100


class FileCheck:
    """Reads the whole file of a batch once.

    Args:
        models: that are served here.
        max_lines: of a batch.

    Attributes:
        num_lines: that are not blank.
        models: that lines name, of those that are served here.
        errors: for which the file cannot be a batch.
    """

    def __init__(
        self,
        files: FileStore,
        bodies: BodyReader,
        models: ModelTable,
        state: BatchState,
        max_lines: int,
    ) -> None:
        self.num_lines = 0
        self.models: set[str] = set()
        self._table = models
        self.errors: list[LineError] = []
        self._files = files
        self._bodies = bodies
        self._state = state
        self._max_lines = max_lines
        self._ids: set[bytes] = set()  # hashes, since ids may be long

    async def run(self) -> Sequence[LineError]:
        """Check all lines, and return the first of the errors.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        max_bytes = max_line_bytes(self._bodies)
        async for line in read_lines(self._files, self._state.input_file, START_OF_FILE, max_bytes):
            if line.number % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if line.is_blank:
                continue
            self.num_lines += 1
            if self.num_lines > self._max_lines:
                self._add(None, "too_many_lines", f"more than {self._max_lines} lines")
                break
            await self._check(line, max_bytes)
            if len(self.errors) >= _MOST_ERRORS:
                break
        if not self.num_lines:
            self._add(None, "empty_file", "the input file has no lines")
        return self.errors

    async def _check(self, line: Line, max_bytes: int) -> None:
        if line.data is None:
            self._add(line, "line_too_long", f"the line is longer than {max_bytes} bytes")
            return
        try:
            found = await self._bodies.parse(CALLER, line.data, parse_line)
        except ApiError as error:
            message = str(error).replace("The body is not", "The line is not")
            message = message.replace("The body must be", "The line must be")
            self._add(line, error.code or "invalid_line", message, error.param)
            return
        self._check_fields(line, found)

    def _check_fields(self, line: Line, found: BatchLine) -> None:
        endpoint = self._state.endpoint
        if found.url != endpoint:
            reason = f"url={found.url[:80]!r}: the batch is for {endpoint}"
            self._add(line, "mismatched_endpoint", reason, "url")
        digest = blake2b(found.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            reason = f"custom_id={found.custom_id[:80]!r}: another line has it, too"
            self._add(line, "duplicate_custom_id", reason, "custom_id")
        self._ids.add(digest)
        name = found.model
        if len(self.models) < _MOST_MODELS and self._table.may_serve(name):
            self.models.add(name)

    def _add(self, line: Line | None, code: str, message: str, param: str | None = None) -> None:
        number = None if line is None else line.number + 1
        self.errors.append(LineError(code, message[:_MOST_MESSAGE_CHARS], number, param))


def max_line_bytes(bodies: BodyReader) -> int:
    """The longest line: one with the largest body."""
    return bodies.max_body_bytes + _AROUND_BODY_BYTES
