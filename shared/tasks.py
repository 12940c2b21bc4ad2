"""Ending tasks for good.

A task is asked to end once, by ``cancel``, and may miss it: code below it that catches too much
takes the cancellation for something else. Whatever must end before a process can leave is
cancelled again until it has.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

_AGAIN_S = 1.0  # longer than any clean-up, which another cancellation would cut short


async def cancel_until_done(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks, and again what goes on, until all have ended; their errors stay in them."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run until one fails, all have ended, or the caller is cancelled; none outlives this.

    Unlike a TaskGroup's, a member that missed its cancellation is cancelled again.

    Raises:
        Exception: of the first member that failed.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_until_done(*tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
