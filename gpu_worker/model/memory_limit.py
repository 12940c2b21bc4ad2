"""The memory that a process may have, which a model's weights must fit into."""

import os
import resource
from pathlib import Path

from shared.errors import ModelUnsupported

_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # versions 2 and 1


def memory_limit() -> int:
    """The least of the machine's memory and the limits of control group and process, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _CGROUP_LIMITS:
        try:
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def refuse_too_large(model: str, weight_bytes: int, limit: int) -> None:
    """Refuse weights that do not fit into memory, before they are read.

    Args:
        model: for errors.
        weight_bytes: of all weights that this process is to hold.
        limit: of its memory.

    Raises:
        ModelUnsupported: with both numbers.
    """
    if weight_bytes > limit:
        raise ModelUnsupported(
            f"{model}: its weights take {weight_bytes} bytes of memory, and this process may have "
            f"{limit}: raise the limit, or split the model with --tensor-parallel-size"
        )
