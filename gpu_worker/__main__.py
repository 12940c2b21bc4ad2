"""``python -m gpu_worker``: the worker as a process."""

import os
import signal
import sys

from gpu_worker.settings import WorkerSettings
from shared.errors import SettingsError
from shared.logs import setup_logging
from shared.settings import exit_with, load_or_exit

# Threads that spin while they wait for each other are fast on an idle machine. Next to other
# processes (the gateway, the scheduler, Redis) they wait for cores that they keep busy themselves:
# decoding on two shared cores was twelve times slower.
_OPENMP = ("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Run until SIGTERM or SIGINT.

    Exits with 0 when told to stop, 2 on bad settings, 78 where a restart cannot help, else 1.
    """
    settings = load_or_exit(WorkerSettings, "PageStream's worker: runs the model.")
    setup_logging("worker", settings.log_level)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))  # until the loop runs and takes them over
    os.environ.setdefault(*_OPENMP)
    from gpu_worker.process import run  # torch's threads read the environment when it is imported

    try:
        sys.exit(run(settings))
    except SettingsError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
