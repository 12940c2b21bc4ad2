"""``python -m gpu_worker``: the worker as a process."""

import os
import signal
import sys
from collections.abc import Callable

from gpu_worker.settings import WorkerSettings
from shared.cpu_priority import never_preempt_others
from shared.errors import SettingsError
from shared.logs import setup_logging
from shared.settings import exit_with, load_or_exit

# Threads that spin while they wait for each other are fast on an idle machine. On cores that are
# shared with the gateway, the scheduler and Redis, spinning takes the time that the others need:
# decoding on two shared cores was twelve times slower.
_OPENMP = ("OMP_WAIT_POLICY", "passive")


def prepare() -> None:
    """Read the settings, set up logs and import the model's code; start no thread or connection.

    Exits with 2 on bad settings.
    """
    settings = _settings()
    os.environ.setdefault(*_OPENMP)  # torch's threads read the environment when it is imported
    import gpu_worker.process  # noqa: F401
    from gpu_worker.startup.preload import preload

    preload(settings)


def main(ready: Callable[[], None] = lambda: None) -> int:
    """Run until SIGTERM or SIGINT.

    Args:
        ready: called when plans can be carried out.

    Returns:
        0 after a signal, 78 if a restart cannot help, else 1. Exits with 2 on bad settings.
    """
    settings = _settings()
    never_preempt_others()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))  # until the loop runs and takes them over
    os.environ.setdefault(*_OPENMP)
    from gpu_worker.process import run

    try:
        return run(settings, ready)
    except SettingsError as error:
        exit_with(error)


def _settings() -> WorkerSettings:
    settings = load_or_exit(WorkerSettings, "PageStream's worker: runs the model.")
    setup_logging("worker", settings.log_level)
    return settings


if __name__ == "__main__":
    sys.exit(main())
