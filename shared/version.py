"""The version of PageStream."""

import importlib.metadata
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def version() -> str:
    """The version of the source tree, else of the installed package."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version("pagestream")
