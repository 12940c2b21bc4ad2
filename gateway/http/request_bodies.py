"""Reads request bodies within a limit, and parses long ones on a thread."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from fastapi import Request

from gateway.http.call import caller_of, read_body
from gateway.http.errors import body_too_complex
from gateway.prompts.fair_threads import FairThreads

_T = TypeVar("_T")

# Up to here, parsing takes less time than passing the body to a thread.
_INLINE_BYTES = 16 * 2**10
# Parsing holds the GIL. The limits of costly values follow from the largest body: a token id takes
# some 5 bytes, a message of a conversation some 60, with 5 strings and maps.
_BYTES_PER_VALUE = 4
_BYTES_PER_STRUCTURE = 40
_QUOTE, _COMMA, _LIST, _MAP = b'",[{'


class BodyReader:
    """Reads and parses the bodies of calls.

    One thread parses long bodies, serving callers in turn: JSON parsers hold the GIL, so several
    threads would only block the event loop longer.

    Args:
        max_body_bytes: the largest body that is accepted.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._max_values = max_body_bytes // _BYTES_PER_VALUE
        self._max_structures = max_body_bytes // _BYTES_PER_STRUCTURE
        self._thread = FairThreads(1, 1, "parse")

    async def read(
        self, request: Request, parse: Callable[[bytes], _T], max_bytes: int | None = None
    ) -> _T:
        """Read a call's body and return the result of ``parse``.

        Args:
            max_bytes: a tighter limit than that of all bodies.

        Raises:
            ApiError: 413 or 400, the body is too large, holds too many values, or ``parse`` refuses
                it.
        """
        limit = self.max_body_bytes
        data = await read_body(request, limit if max_bytes is None else min(limit, max_bytes))
        return await self.parse(caller_of(request), data, parse)

    async def parse(self, caller: str, data: bytes, parse: Callable[[bytes], _T]) -> _T:
        """Return the result of ``parse``, which runs on the thread if there is much to do.

        Args:
            caller: by which the thread is shared.

        Raises:
            ApiError: 400, the data holds too many values, or ``parse`` refuses it.
        """
        if len(data) <= _INLINE_BYTES:
            return parse(data)

        def check_and_parse() -> _T:
            self._check(data)
            return parse(data)

        return await self._thread.run(caller, check_and_parse)

    def close(self) -> None:
        """Stop the thread; ``read`` may not be called afterwards."""
        self._thread.close()

    def _check(self, data: bytes) -> None:
        """Refuse a body whose values would take too long to parse."""
        num_values, num_structures = count_values(data)
        if num_structures > self._max_structures:
            raise body_too_complex("strings, lists and maps", num_structures, self._max_structures)
        if num_values > self._max_values:
            raise body_too_complex("values", num_values, self._max_values)


def count_values(data: bytes) -> tuple[int, int]:
    """Values in a JSON text, and how many of them are strings, keys, lists and maps.

    At least as many as a parser finds before the first error. Takes some 5 ms for 4 MB, for most of
    which numpy releases the GIL.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    chars = np.frombuffer(data, np.uint8)  # [num_bytes]
    quotes = chars == _QUOTE
    outside = ~np.logical_xor.accumulate(quotes)  # of strings
    num_strings = (np.count_nonzero(quotes) + 1) // 2
    num_containers = np.count_nonzero(((chars == _LIST) | (chars == _MAP)) & outside)
    num_commas = np.count_nonzero((chars == _COMMA) & outside)
    return int(num_commas + num_containers + 1), int(num_strings + num_containers)
