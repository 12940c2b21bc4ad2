"""Runs a file of tests in Triton's interpreter.

The interpreter has to be selected before Triton is imported, and other tests may have imported it
already. So such files, which are not named test_*, run in a process of their own.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent


def _is_broken() -> bool:
    """Triton's interpreter before 3.7 uses functions that numpy has removed."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return False
    is_old = tuple(map(int, triton.split(".")[:2])) < (3, 7)
    return is_old and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


needs_interpreter = pytest.mark.skipif(
    _is_broken(), reason="Triton's interpreter before 3.7 does not run with numpy 2.4"
)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's folder; its output is text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_passes_interpreted(*files: Path) -> None:
    """Assert that all tests of these files pass, in one process: it takes long to start."""
    # numpy before 2.4 only warns about the functions that Triton before 3.7 uses.
    warned = ("-W", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    options = ("-q", "-p", "no:cacheprovider", *warned, *map(str, files))
    done = run_python("-m", "pytest", *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
