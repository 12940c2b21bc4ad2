"""Starts and asks a process that compiles grammars."""

import json
import subprocess
import sys
from collections.abc import Callable

from gateway.grammars.compile_process import LIMIT_S


class CompileChild:
    """One such process; started when it is first asked, and anew after a grammar that ended it.

    Not thread-safe.

    Args:
        tokenizer: makes the text of a ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> None:
        """Wait until a grammar is compiled.

        Raises:
            ValueError: the reason why it cannot be.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            raise ValueError(
                f"it takes more than {LIMIT_S:g} s of CPU time or too much memory to compile"
            )
        if reason := json.loads(answer):
            raise ValueError(reason)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[str]":
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "gateway.grammars.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._tokenizer()) + "\n")
        return process
