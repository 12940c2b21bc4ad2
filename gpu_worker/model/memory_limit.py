"""The memory that a process may have, which a model's weights must fit into."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shared.errors import ModelUnsupported

_CGROUPS = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """The least of the machine's memory and the limits of control group and process, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _cgroup_files():
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _cgroup_files() -> Iterator[Path]:
    """Files with limits of this process's control group, of version 2 and 1."""
    group = {"": "", "memory": ""}  # a container's own group is the root that it sees
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group[controllers] = path.lstrip("/")
    for path in {"", group[""]}:
        yield _CGROUPS / path / "memory.max"
    for path in {"", group["memory"]}:
        yield _CGROUPS / "memory" / path / "memory.limit_in_bytes"


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
