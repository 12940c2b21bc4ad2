"""What a spawner tells whoever started it, through a pipe: lines of plain words.

ready          the service does its work
died HOW       it does not, and is forked again
"""

import contextlib
import os
from collections.abc import Mapping

NEWS_FD = "SPAWNER_NEWS_FD"
READY = "ready"
DIED = "died"


class NewsReader:
    """The reading end, and a writing end for a process to inherit."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)
        self._rest = b""

    def fileno(self) -> int:
        """To wait on."""
        return self._read_end

    def lines(self) -> list[str]:
        """What has arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read_end, 4096):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def inherited(self) -> None:
        """The other process has its writing end; ours is not needed."""
        os.close(self.write_end)

    def close(self) -> None:
        """Nobody will write any more; may be said twice."""
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1


def tell(environ: Mapping[str, str], line: str) -> None:
    """Write a line, if somebody listens."""
    if (number := environ.get(NEWS_FD, "")).isdigit():
        with contextlib.suppress(OSError):  # nobody reads any more, or too slowly
            os.write(int(number), f"{line}\n".encode())
