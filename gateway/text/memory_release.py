"""Returns free memory of this process to the system.

glibc keeps free memory in an arena for each few threads, and serves ever larger buffers from there
once one was freed. A gateway that reads large bodies and writes long answers on several threads
grows by what is left between those that live longer.
"""

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NUM_ARENAS = 2  # the event loop's, and one that all other threads share
_LARGE_BYTES = 128 * 2**10  # larger buffers are mapped each by itself, and unmapped when freed


def limit_free_memory() -> None:
    """Let the C library keep little free memory, if it is glibc; before threads start.

    Measured with ``scripts/soak --hostile``: gateways rest at 180 MiB instead of 285.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def release_free_memory() -> None:
    """Make the C library return free pages of all threads, if it is glibc.

    Other threads run meanwhile. It takes about 1 ms for each 2 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
