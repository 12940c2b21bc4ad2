"""The folder of compiled CPU kernels."""

import os
from collections.abc import Mapping
from pathlib import Path

from shared.cache_folder import cache_folder

KERNEL_CACHE = "NUMBA_CACHE_DIR"


def kernel_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that the environment names, else one in the user's cache.

    All checkouts may share it: numba's keys have the path and content of the source, the version of
    Python, and the CPU.
    """
    if environ.get(KERNEL_CACHE):
        return Path(environ[KERNEL_CACHE])
    return cache_folder(environ) / "numba"
