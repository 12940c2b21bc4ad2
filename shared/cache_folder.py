"""The user's cache folder: downloaded models, compiled kernels."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``pagestream`` below XDG_CACHE_HOME, else below ``~/.cache``; it may not exist yet."""
    base = environ.get("XDG_CACHE_HOME", "")
    # As the XDG base directory specification requires, relative paths are ignored.
    parent = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return parent / "pagestream"
