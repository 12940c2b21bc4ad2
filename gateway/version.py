"""The version of PageStream that runs."""

import importlib.metadata
import tomllib
from pathlib import Path


def version() -> str:
    """As installed, or as the source tree says."""
    try:
        return importlib.metadata.version("pagestream")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
        return str(project["project"]["version"])
