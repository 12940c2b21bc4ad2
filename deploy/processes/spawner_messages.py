"""Messages from a spawner to the process that started it: lines of text in a pipe.

ready          the service works
died HOW       the service died, and is forked again
"""

import contextlib
import os
from collections.abc import Mapping

MESSAGES_FD = "SPAWNER_MESSAGES_FD"
READY = "ready"
DIED = "died"


class MessageReader:
    """The reading end of a pipe, and a writing end for a process to inherit."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)
        self._rest = b""

    def fileno(self) -> int:
        """File descriptor to wait on."""
        return self._read_end

    def lines(self) -> list[str]:
        """The lines that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read_end, 4096):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def inherited(self) -> None:
        """Close the writing end here, after the other process has inherited it."""
        os.close(self.write_end)

    def close(self) -> None:
        """Close the reading end; may be called twice."""
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1


def write_message(environ: Mapping[str, str], line: str) -> None:
    """Write a line to the pipe that ``environ`` names, if there is one."""
    if (number := environ.get(MESSAGES_FD, "")).isdigit():
        with contextlib.suppress(OSError):  # the reader is gone or too slow
            os.write(int(number), f"{line}\n".encode())
