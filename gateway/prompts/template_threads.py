"""Runs chat templates on threads with a time limit, as they are programs of the model's authors."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway.http.errors import overloaded
from gateway.prompts.control_tokens import TemplateRefused
from gateway.prompts.fair_threads import FairThreads

_THREADS = 3
_THREADS_PER_CALLER = 2  # one is left for other callers

_T = TypeVar("_T")


class _TooSlow(BaseException):
    """Raised inside a running template, where no ``except Exception`` catches it."""


class TemplateThreads:
    """Runs templates on threads, each for a limited time.

    A thread cannot be stopped from outside, but an exception can be raised in it between two
    bytecode instructions, and templates are compiled to bytecode. A template that hangs in one
    instruction keeps its thread; calls that wait for a thread are refused after the same time.

    Args:
        limit_s: time limit of a template, and of waiting for a thread.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._threads = FairThreads(_THREADS, _THREADS_PER_CALLER, "template")

    async def run(self, work: Callable[[], _T], caller: str = "") -> _T:
        """Run ``work`` on a thread; return its result or raise its exception.

        Args:
            caller: threads are shared fairly between callers.

        Raises:
            TemplateRefused: it took too long.
            ApiError: 429, no thread was free in time.
        """
        job = _Job()
        future = asyncio.ensure_future(self._threads.run(caller, partial(job.run, work)))
        done, _ = await asyncio.wait({future}, timeout=self._limit_s)
        if not done and job.started_s is not None:
            rest_s = job.started_s + self._limit_s - time.monotonic()
            done, _ = await asyncio.wait({future}, timeout=max(0.0, rest_s))
        if done:
            return future.result()
        # An exception that is never retrieved would be logged.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if job.started_s is None:
            future.cancel()
            raise overloaded("chat templates of other calls take all threads")
        job.interrupt()
        raise TemplateRefused(f"it took longer than {self._limit_s:g} s")

    def close(self) -> None:
        """Stop the threads; ``run`` may not be called afterwards."""
        self._threads.close()


class _Job:
    """One run of a template.

    Attributes:
        started_s: monotonic time at which a thread took it, None before.
    """

    def __init__(self) -> None:
        self.started_s: float | None = None
        self._thread = 0
        self._lock = threading.Lock()  # guards the two flags
        self._is_over = False
        self._is_interrupted = False

    def run(self, work: Callable[[], _T]) -> _T:
        """Run on a thread of the pool."""
        self._thread, self.started_s = threading.get_ident(), time.monotonic()
        result: list[_T] = []
        error: Exception | None = None
        try:
            try:
                result.append(work())
            except Exception as raised:
                error = raised
            with self._lock:
                self._is_over = True
            if self._is_interrupted:
                # It has arrived, or was swallowed where nothing can be raised (a destructor), or is
                # pending and must not reach the next job.
                _raise_in(self._thread, None)
                raise _TooSlow
        except _TooSlow:
            raise TemplateRefused("it took too long") from None
        if error is not None:
            raise error
        return result[0]

    def interrupt(self) -> None:
        """Raise an exception in the thread, unless the work has ended."""
        with self._lock:
            if not self._is_over:
                self._is_interrupted = True
                _raise_in(self._thread, _TooSlow)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next bytecode; None: drop one that is pending."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
