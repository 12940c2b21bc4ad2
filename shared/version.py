"""The version of PageStream that runs."""

import importlib.metadata
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def version() -> str:
    """As the source tree has it, else as installed."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version("pagestream")
