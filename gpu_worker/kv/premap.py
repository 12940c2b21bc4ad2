"""Maps for the next plan while one is carried out (vAttention, section 6.1).

It only saves time: without it, or if it comes too late, everything is mapped when its plan is
carried out.
"""

import asyncio
from concurrent import futures
from typing import Protocol

from gpu_worker.plan_reader import PlanReader
from shared.errors import BusUnavailable
from shared.messages.plans import StepPlan


class Foreseeing(Protocol):
    """Who prepares for plans."""

    def foresee(self, plan: StepPlan) -> None:
        """Prepare for the next plan, on another thread than steps are computed on."""


class LookAhead:
    """Hands plans over ahead of their time.

    Args:
        executor: who prepares.
        thread: where it does.
    """

    def __init__(self, executor: Foreseeing, thread: futures.Executor) -> None:
        self._executor = executor
        self._thread = thread

    async def prepare(self, plans: PlanReader, step: int) -> None:
        """Wait for what follows this step, which is under way; prepare for it if it is a plan."""
        try:
            message = await plans.peek()
        except BusUnavailable:
            return  # the worker's loop meets it, too
        if isinstance(message, StepPlan) and message.step == step + 1:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._executor.foresee, message)
