"""A child process that dies with the launcher."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.log_files import open_log
from deploy.processes.die_with_parent import dying_with_this_process
from deploy.processes.spawner_messages import MESSAGES_FD, MessageReader
from shared.logs import LOG_FILE


class Child:
    """A running process with a log file and a pid file, in a session of its own.

    The session keeps the terminal's Ctrl-C away from it, because the launcher decides when it
    stops.

    Args:
        log: file to append its output to.
        pid_file: holds its process id while it runs.
        umask: of the process; -1: this one's.

    Attributes:
        messages: from the process, if it is a spawner; closed when ``poll`` has found it ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        pid_file: Path,
        umask: int = -1,
    ) -> None:
        self._log = log
        self._pid_file = pid_file
        self.messages = MessageReader()
        with open(open_log(log), "ab") as output:
            self._log_start = output.seek(0, os.SEEK_END)
            self._log_file = os.fstat(output.fileno()).st_ino
            self._process = subprocess.Popen(
                dying_with_this_process(command),
                env={**environ, MESSAGES_FD: str(self.messages.write_end), LOG_FILE: str(log)},
                pass_fds=(self.messages.write_end,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=umask,
            )
        self.messages.inherited()
        pid_file.write_text(f"{self.pid}\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, minus the signal that ended it, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self.kill()  # ends the processes that it may have started
            self._pid_file.unlink(missing_ok=True)
            self.messages.close()
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and all processes of its session."""
        with contextlib.suppress(ProcessLookupError):  # no process is left in its session
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines that this process wrote to its present log file; none if it is missing."""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                start = self._log_start if os.fstat(log.fileno()).st_ino == self._log_file else 0
                log.seek(max(start, end - 16_384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-num_lines:]
