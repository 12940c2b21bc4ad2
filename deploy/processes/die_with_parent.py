"""Runs a command that is killed when its parent dies: die_with_parent.py PARENT COMMAND ...

It is a program of its own, because a fork that runs Python before its exec is not safe beside
threads. Linux only; on other systems services outlive a killed launcher until its next start.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def dying_with_this_process(command: Sequence[str]) -> list[str]:
    """The command line for a child of this process that is killed when this process dies."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def die_with(parent: int) -> None:
    """Let the kernel kill this process as soon as its parent, of this id, is dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def main() -> None:
    """Register with the kernel, then run the command in this process."""
    parent, *command = sys.argv[1:]
    die_with(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
