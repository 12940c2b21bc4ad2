"""Premapping: maps blocks for the next plan while a step computes (vAttention, section 6.1).

It only saves time: what is not premapped is mapped when the plan is carried out.
"""

import asyncio
from concurrent import futures
from typing import Protocol

from gpu_worker.plan_reader import PlanReader
from shared.errors import BusUnavailable
from shared.messages.plans import StepPlan


class PlanPremapper(Protocol):
    """Maps blocks for plans ahead of time."""

    def premap(self, plan: StepPlan) -> None:
        """Map blocks for the next plan; called on another thread than steps."""


class Premapper:
    """Peeks at the next plan and premaps it on a thread of its own.

    Args:
        executor: maps the blocks.
        thread: to map on.
    """

    def __init__(self, executor: PlanPremapper, thread: futures.Executor) -> None:
        self._executor = executor
        self._thread = thread

    async def premap_next(self, plans: PlanReader, step: int) -> None:
        """Wait for the next message; premap it if it is the plan of the step after ``step``."""
        try:
            message = await plans.peek()
        except BusUnavailable:
            return  # the worker's loop gets and handles the same error
        if isinstance(message, StepPlan) and message.step == step + 1:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._executor.premap, message)
