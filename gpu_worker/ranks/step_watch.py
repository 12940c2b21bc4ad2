"""Ends a step of a GPU that takes too long, since sums in a captured graph have no deadline."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gpu_worker.ranks.member import GroupOver


class StepWatch:
    """Watches one step at a time on a thread of its own.

    Args:
        give_up: ends what the device still computes; called at most once, on the thread.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._changed = threading.Condition()
        self._seconds: float | None = None  # of the step that runs; None: none does
        self._number = 0  # of steps so far
        self._is_over = False
        threading.Thread(target=self._watch, name="step-watch", daemon=True).start()

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Give up if the block takes longer.

        Raises:
            GroupOver: it did; errors of the block are its consequence.
        """
        with self._changed:
            self._seconds = seconds
            self._number += 1
            self._changed.notify()
        late = f"a step took more than {seconds:.1f} s"
        try:
            yield
        except RuntimeError as error:
            if self._ended():
                raise GroupOver(f"{late}: {error}") from error
            raise
        except BaseException:
            self._ended()
            raise
        if self._ended():
            raise GroupOver(late)

    def _ended(self) -> bool:
        """Mark that no step runs; whether the last one was given up."""
        with self._changed:
            self._seconds = None
            self._changed.notify()
            return self._is_over

    def _watch(self) -> None:
        with self._changed:
            while not self._is_over:
                self._changed.wait_for(lambda: self._seconds is not None)
                ended = partial(self._has_ended, self._number)
                in_time = self._changed.wait_for(ended, self._seconds)
                self._is_over = not in_time
        self._give_up()

    def _has_ended(self, number: int) -> bool:
        return self._seconds is None or self._number != number
