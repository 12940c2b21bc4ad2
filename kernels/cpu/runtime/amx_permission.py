"""Permission to use AMX: Linux gives a process the tiles' registers only after it has asked."""

import ctypes
import platform
import sys
from functools import cache

FEATURES = {"amx-tile", "amx-bf16"}
"""Of CPUs with AMX for bfloat16, by LLVM's names."""

_ARCH_PRCTL = 158  # the system call's number on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def permission_refused() -> str | None:
    """Why this process may not use AMX; None: it may, as may its threads and forks from now on."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"{sys.platform} on {platform.machine()} is not asked for permission"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): error {ctypes.get_errno()}"
