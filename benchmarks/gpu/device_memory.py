"""A device's memory between two parts of a run."""

import gc
from contextlib import suppress

import torch


def free_unused() -> None:
    """Give memory back that the last part no longer holds."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a kernel that broke the device has been named already
            torch.cuda.empty_cache()
