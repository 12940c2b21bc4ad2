"""Steps that are under way: begun in the order of their plans, wherever they are computed.

On a GPU a step is begun before the one before has ended, its plan only has to be there; on a CPU it
begins when that one has ended, without asking the loop.
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

# A step that was slow for once must not let a dead worker's lease live long for ever.
_WINDOW_S = 120.0


@dataclass(frozen=True, slots=True)
class _Executed:
    """A step that was carried out, and when."""

    result: StepResult
    began_s: float
    ended_s: float
    look: Any  # the observer's


class Computing:
    """What the worker's loop knows of the threads and the device that compute.

    Args:
        executor: a loaded model.
        observer: gets every step.
        clock_s: monotonic time.
        thread: computes steps; None: the loop does, and can do nothing else meanwhile.
        pipeline: what the executor can do if steps may overlap; asks for ``thread``.
        waiting: a thread that has nothing to do but to wait for the device.
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
        self._ended_s: float | None = None  # when it was computed, if the next plan was there
        self._failed: BaseException | None = None  # in a step; those behind it are not carried out

    @property
    def longest_s(self) -> float:
        """The longest step of the last minutes, in seconds."""
        return self._longest_s.value

    @property
    def unfinished(self) -> asyncio.Future[StepResult] | None:
        """Of the step that was begun last, unless it has ended."""
        return None if self._last is None or self._last.done() else self._last

    def begin(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Carry out a plan, behind those that were begun before.

        Returns:
            Its result, once it is there; else PlanRefused, or whatever the model raised.
        """
        if self._pipeline is not None:
            overlapping = self._overlap(plan, self._pipeline, before=self._last)
            self._last = asyncio.create_task(overlapping)
            return self._last
        loop = asyncio.get_running_loop()
        told: asyncio.Future[StepResult] = loop.create_future()
        self._last = told
        if self._thread is None:
            self._tell(told, self._execute(plan))
        else:
            self._thread.submit(self._compute, plan, told, loop)
        return told

    def plan_is_late(self) -> None:
        """What passes until the next step begins is not the loop's doing."""
        self._ended_s = None

    async def end(self) -> None:
        """Wait for a step that is under way; nobody wants its result, nor why there is none."""
        last, self._last = self._last, None
        if last is None:
            return
        if not last.done():
            await asyncio.wait([last])
        if not last.cancelled():
            last.exception()

    async def reset(self) -> None:
        """Forget all sequences, once no step is under way.

        Raises:
            Exception: whatever the model raised in that one.
        """
        last, self._last = self._last, None
        if last is not None:
            with suppress(PlanRefused):  # a plan that nobody wants any more
                await last
        self._failed = None
        self._ended_s = None
        self._executor.reset()

    # ---------------------------------------------------------- one after the other

    def _compute(
        self,
        plan: StepPlan,
        told: asyncio.Future[StepResult],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Carry out a plan, on the thread; asyncio's own way takes three callbacks more."""
        outcome = self._execute(plan)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to whom it matters
            loop.call_soon_threadsafe(self._tell, told, outcome)

    def _execute(self, plan: StepPlan) -> _Executed | BaseException:
        """Carry out a plan, unless one before it failed; on whatever thread."""
        if self._failed is not None:
            return self._failed
        began_s = self._clock_s()
        try:
            result = self._executor.execute(plan)
            return _Executed(result, began_s, self._clock_s(), self._observer.look())
        except BaseException as error:  # somebody waits, whatever it is
            self._failed = error
            return error

    def _tell(self, told: asyncio.Future[StepResult], outcome: _Executed | BaseException) -> None:
        """Hand on what was computed, on the loop."""
        if told.done():
            return  # the loop is being torn down
        if isinstance(outcome, BaseException):
            told.set_exception(outcome)
            return
        try:
            self._note(outcome, self._overhead_s(outcome.began_s))
        except Exception as error:
            told.set_exception(error)
        else:
            told.set_result(outcome.result)

    # ----------------------------------------------------------------- overlapping

    async def _overlap(
        self, plan: StepPlan, pipeline: Pipeline[Any], before: asyncio.Future[StepResult] | None
    ) -> StepResult:
        """Let the device begin; the result comes when it is done."""
        loop = asyncio.get_running_loop()
        began_s = self._clock_s()
        busy = before is not None and not before.done()
        overhead_s = 0.0 if busy else self._overhead_s(began_s)
        step = await loop.run_in_executor(self._thread, self._begin, plan, pipeline)
        await loop.run_in_executor(self._waiting, step.wait)
        result, look = await loop.run_in_executor(self._thread, self._finish, step, pipeline)
        self._note(_Executed(result, began_s, self._clock_s(), look), overhead_s)
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
        return pipeline.finish(step), self._observer.look()

    # ----------------------------------------------------------------- notes

    def _overhead_s(self, began_s: float) -> float | None:
        return None if self._ended_s is None else began_s - self._ended_s

    def _note(self, step: _Executed, overhead_s: float | None) -> None:
        self._ended_s = step.ended_s
        self._longest_s.add(step.ended_s - step.began_s)
        self._observer.step(step.result, step.look, overhead_s)
