"""Runs a file of tests in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, and other tests may have imported it: so
such files, which are not named test_*, get a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another Python in the project's folder; its output is text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_passes_interpreted(file: Path) -> None:
    """All tests of a file pass."""
    options = ("-q", "-p", "no:cacheprovider", str(file))
    done = run_python("-m", "pytest", *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
