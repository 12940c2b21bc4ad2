"""Frees a device's memory between two parts of a run."""

import gc
from contextlib import suppress

import torch


def free_unused() -> None:
    """Return memory that the last part no longer uses."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a kernel that broke the device has been reported already
            torch.cuda.empty_cache()
