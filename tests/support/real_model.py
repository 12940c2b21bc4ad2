"""Where the real model is: SmolLM2-135M-Instruct, made before by ``models/smollm2.py``."""

import os
from pathlib import Path

import pytest

from deploy.known_models import known_models

GIVEN = "PAGESTREAM_TEST_REAL_MODEL"


def real_model_or_skip() -> Path:
    """The folder that PAGESTREAM_TEST_REAL_MODEL names, or else one in the user's cache."""
    given = os.environ.get(GIVEN)
    folder = Path(given).expanduser() if given else known_models()["smollm2"]
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no real model in {folder}; {GIVEN} names another folder")
    return folder.absolute()
