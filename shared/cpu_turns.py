"""How a process shares cores with threads that compute."""

import os
from contextlib import suppress


def wait_for_turns() -> None:
    """Let this process, and what it starts, wait for a core instead of taking it from somebody.

    A thread that is interrupted in the middle of a matrix product keeps all others waiting that
    compute with it, for much longer than the few hundred microseconds that a service needs. They
    offer their cores by themselves; a thread that does not is interrupted after a few milliseconds.
    Linux only (``SCHED_BATCH``); elsewhere, and where it is forbidden, all is as it was.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
