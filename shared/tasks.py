"""Cancels tasks until they have ended.

A library that catches too many exceptions may swallow a cancellation. Tasks that must end before a
process exits are therefore cancelled repeatedly.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

_REPEAT_S = 1.0  # longer than any clean-up, which another cancellation would interrupt


async def cancel_until_done(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks repeatedly until all have ended; their exceptions are not raised here."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_REPEAT_S)


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run until one fails, all have ended, or the caller is cancelled; then cancel the others.

    Unlike in a TaskGroup, a task that swallowed its cancellation is cancelled again.

    Raises:
        Exception: of the first that failed.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_until_done(*tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
