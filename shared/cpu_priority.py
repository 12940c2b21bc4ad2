"""The scheduling policy of services that share cores with threads that compute."""

import os
from contextlib import suppress


def never_preempt_others() -> None:
    """Let this process and its children wait for a core instead of preempting other threads.

    A thread that is preempted during a matrix product delays all threads that compute with it, for
    much longer than the few hundred microseconds that a service needs. Threads that compute yield
    their cores between products; one that does not is preempted after a few milliseconds.
    Linux only (``SCHED_BATCH``); no effect elsewhere, or where it is forbidden.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
