"""The user's folder for what can be made again: models that were fetched, compiled kernels."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``pagestream`` below XDG_CACHE_HOME, else below ``~/.cache``. It need not exist yet."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification has relative paths ignored.
    parent = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return parent / "pagestream"
