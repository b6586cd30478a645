"""Make malloc keep freed blocks in the process of a rank that computes on the CPU.

By default, glibc maps each large block from the kernel and unmaps it when it is freed. A training step allocates
tensors of the same sizes again and again. Each step therefore touches thousands of new pages, which the kernel must
clear first. For a small decoder, this took 6 % of a step's CPU time.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes

# These values are from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD = 256 << 20
"""A freed block of at least this many bytes is still unmapped, because blocks of this size are rarely reused."""
TRIM_THRESHOLD = 1 << 30
"""The number of free bytes at the end of the heap that the process keeps."""


def keep_freed_memory() -> bool:
    """Let malloc reuse freed blocks of up to `MMAP_THRESHOLD` bytes. Return whether the C library supports this.

    The process keeps at most `TRIM_THRESHOLD` bytes more than by default. A C library without mallopt (musl, macOS) and
    a preloaded allocator (jemalloc, tcmalloc) are not changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # TRIM_THRESHOLD must fit into an int: glibc stores a long, but mallopt takes an int
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
