"""Runs steps in the order of their plans on the compute thread, and on a GPU overlaps them.

On a GPU a step begins as soon as its plan has arrived, while the step before computes. On a CPU
the compute thread begins it when the step before has ended, without going through the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.step.plan_executor import Pipeline, PlanExecutor, StepObserver
from gpu_worker.step.recent_maximum import RecentMaximum
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan

# The lease outlives the longest recent step; one slow step must not make it long for ever.
_WINDOW_S = 120.0


@dataclass(frozen=True, slots=True)
class _Executed:
    """A step that was computed, and its times."""

    result: StepResult
    began_s: float
    ended_s: float
    snapshot: Any  # the observer's


class StepQueue:
    """Queues steps for the compute thread or the device, and returns futures of their results.

    Args:
        executor: carries out plans on a loaded model.
        observer: records every step.
        clock_s: monotonic time.
        thread: computes steps; None: the loop computes them, and does nothing else meanwhile.
        pipeline: the executor's overlapping steps, which need ``thread``; None: no overlap.
        waiting: thread that waits for the device.
    """

    def __init__(
        self,
        executor: PlanExecutor,
        observer: StepObserver[Any],
        clock_s: Callable[[], float],
        thread: futures.Executor | None,
        pipeline: Pipeline[Any] | None,
        waiting: futures.Executor | None,
    ) -> None:
        self._longest_s = RecentMaximum(_WINDOW_S, clock_s)
        self._executor = executor
        self._observer = observer
        self._clock_s = clock_s
        self._thread = thread
        self._pipeline = pipeline
        self._waiting = waiting
        self._last: asyncio.Future[StepResult] | None = None  # of the step that was begun last
        self._ended_s: float | None = None  # when it ended; None if the next plan came late
        self._failed: BaseException | None = None  # error of a step; later ones are not computed

    @property
    def longest_s(self) -> float:
        """The longest step of the last minutes, in seconds."""
        return self._longest_s.value

    @property
    def unfinished(self) -> asyncio.Future[StepResult] | None:
        """The future of the step that was begun last; None if it is done."""
        return None if self._last is None or self._last.done() else self._last

    def begin(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queue a plan behind those that were begun before.

        Returns:
            A future of its result; it raises PlanRefused, or whatever the model raised.
        """
        if self._pipeline is not None:
            overlapping = self._overlap(plan, self._pipeline, before=self._last)
            self._last = asyncio.create_task(overlapping)
            return self._last
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._last = future
        if self._thread is None:
            self._resolve(future, self._execute(plan))
        else:
            self._thread.submit(self._compute, plan, future, loop)
        return future

    def mark_plan_late(self) -> None:
        """Mark that the loop waits for a plan: the time until the next step is no overhead."""
        self._ended_s = None

    async def end(self) -> None:
        """Wait for a step under way and drop its result or error."""
        last, self._last = self._last, None
        if last is None:
            return
        if not last.done():
            await asyncio.wait([last])
        if not last.cancelled():
            last.exception()

    async def reset(self) -> None:
        """Wait for a step under way, then drop all sequences.

        Raises:
            Exception: whatever the model raised in that step.
        """
        last, self._last = self._last, None
        if last is not None:
            with suppress(PlanRefused):  # its result is dropped anyway
                await last
        self._failed = None
        self._ended_s = None
        self._executor.reset()

    # ---------------------------------------------------------- one after the other

    def _compute(
        self,
        plan: StepPlan,
        future: asyncio.Future[StepResult],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Carry out a plan on the thread; ``run_in_executor`` would take three callbacks more."""
        outcome = self._execute(plan)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._resolve, future, outcome)

    def _execute(self, plan: StepPlan) -> _Executed | BaseException:
        """Carry out a plan unless one before it failed; its outcome, or the error."""
        if self._failed is not None:
            return self._failed
        began_s = self._clock_s()
        try:
            result = self._executor.execute(plan)
            return _Executed(result, began_s, self._clock_s(), self._observer.snapshot())
        except BaseException as error:  # any kind: the loop waits for this future
            self._failed = error
            return error

    def _resolve(
        self, future: asyncio.Future[StepResult], outcome: _Executed | BaseException
    ) -> None:
        """Complete a step's future, on the loop."""
        if future.done():
            return  # cancelled, because the loop shuts down
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
            return
        try:
            self._observe(outcome, self._overhead_s(outcome.began_s))
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(outcome.result)

    # ----------------------------------------------------------------- overlapping

    async def _overlap(
        self, plan: StepPlan, pipeline: Pipeline[Any], before: asyncio.Future[StepResult] | None
    ) -> StepResult:
        """Begin a step on the device, wait for it, and return its result."""
        loop = asyncio.get_running_loop()
        began_s = self._clock_s()
        busy = before is not None and not before.done()
        overhead_s = 0.0 if busy else self._overhead_s(began_s)
        step = await loop.run_in_executor(self._thread, self._begin, plan, pipeline)
        await loop.run_in_executor(self._waiting, step.wait)
        result, snapshot = await loop.run_in_executor(self._thread, self._finish, step, pipeline)
        self._observe(_Executed(result, began_s, self._clock_s(), snapshot), overhead_s)
        return result

    def _begin(self, plan: StepPlan, pipeline: Pipeline[Any]) -> Any:
        if self._failed is not None:
            raise self._failed
        try:
            return pipeline.begin(plan)
        except Exception as error:
            self._failed = error
            raise

    def _finish(self, step: Any, pipeline: Pipeline[Any]) -> tuple[StepResult, Any]:
        return pipeline.finish(step), self._observer.snapshot()

    # ----------------------------------------------------------------- observation

    def _overhead_s(self, began_s: float) -> float | None:
        return None if self._ended_s is None else began_s - self._ended_s

    def _observe(self, step: _Executed, overhead_s: float | None) -> None:
        self._ended_s = step.ended_s
        self._longest_s.add(step.ended_s - step.began_s)
        self._observer.step(step.result, step.snapshot, overhead_s)
