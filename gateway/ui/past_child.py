"""Asks a process of its own about the past, so that requests are served meanwhile."""

import asyncio
import json
import sys
from typing import Any

import msgpack

from gateway.http.errors import ApiError, overloaded

_MODULE = "scheduler_svc.past.child"
_MOST_WAITING = 4  # questions; one is answered at a time
_LIMIT_S = 40.0


class PastChild:
    """Answers questions one after the other, each in a fresh process."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._num_asked = 0

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            ApiError: 429, too many are asked; 400, the process refuses it; 503, it has failed.
        """
        if self._num_asked >= _MOST_WAITING:
            raise overloaded(f"{_MOST_WAITING} questions about the past are being answered")
        self._num_asked += 1
        try:
            async with self._turn:
                found = await _ask(await asyncio.to_thread(msgpack.packb, question))
        finally:
            self._num_asked -= 1
        if "error" in found:
            raise ApiError(400, f"this stretch cannot be shown: {found['error']}")
        return found


async def _ask(data: bytes) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _MODULE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate(data)
    except TimeoutError:
        output = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not output:
        raise ApiError(503, "the process that reads the past has failed, or took too long")
    found: dict[str, Any] = await asyncio.to_thread(json.loads, output)
    return found
