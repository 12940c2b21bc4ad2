"""Serializes long answers piece by piece, as fast as the client reads."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE_TOKENS = 4096
_PIECE_CHARS = 64 * 2**10
_SHORT_LIST = 64  # is written at once, with what its items hold
_DEEPEST = 4  # maps below are short: log-probabilities at one place


class PiecewiseJson(Response):
    """A JSON response in pieces, each made after the client has read those before.

    So an unread answer takes only the memory of its data, and each piece blocks the event loop
    only briefly.

    Args:
        pieces: of the JSON text, in order.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a client that reads fast must not delay others
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def dumped(answer: dict[str, Any]) -> bytes:
    """An answer's JSON, made in pieces so that other threads can run in between.

    ``json.dumps`` holds the GIL: with log-probabilities of a long prompt it would block the event
    loop, on whatever thread it runs.
    """
    return "".join(_pieces(answer, 0)).encode("ascii")


def _pieces(given: object, depth: int) -> Iterator[str]:
    """JSON of a value: maps and ``choices`` by member, longer lists in slices."""
    if isinstance(given, dict) and depth < _DEEPEST:
        before = "{"
        for name, member in given.items():
            yield f"{before}{json.dumps(name)}: "
            yield from _pieces(member, depth + 1)
            before = ", "
        yield "}" if given else "{}"
    elif isinstance(given, list) and len(given) > _SHORT_LIST and depth > 1:
        starts = range(0, len(given), _SHORT_LIST)
        slices = (json.dumps(given[start : start + _SHORT_LIST])[1:-1] for start in starts)
        yield from _listed(slices)
    elif isinstance(given, list) and depth == 1:
        yield from _listed("".join(_pieces(item, depth + 1)) for item in given)
    else:
        yield json.dumps(given)


def _listed(pieces: Iterator[str]) -> Iterator[str]:
    yield "["
    for number, piece in enumerate(pieces):
        yield ", " + piece if number else piece
    yield "]"


def members(*given: tuple[str, Iterator[str]]) -> Iterator[bytes]:
    """JSON of a map, from its members' names and the pieces of their JSON."""
    before = "{"
    for name, pieces in given:
        yield f"{before}{json.dumps(name)}:".encode()
        yield from map(str.encode, pieces)
        before = ","
    yield b"}"


def value(given: object) -> Iterator[str]:
    """JSON of a short value."""
    yield json.dumps(given)


def items(given: Sequence[object]) -> Iterator[str]:
    """JSON of a list of any length."""
    starts = range(0, len(given), _PIECE_TOKENS)
    slices = (json.dumps(list(given[start : start + _PIECE_TOKENS]))[1:-1] for start in starts)
    joined = (("," if number else "") + piece for number, piece in enumerate(slices))
    return chain("[", joined, "]")


def text(given: str) -> Iterator[str]:
    """JSON of a text of any length."""
    starts = range(0, len(given), _PIECE_CHARS)
    pieces = (json.dumps(given[start : start + _PIECE_CHARS])[1:-1] for start in starts)
    return chain('"', pieces, '"')
