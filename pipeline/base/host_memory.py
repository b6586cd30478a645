"""Host memory of a rank that computes on the CPU: keep freed blocks in the process instead of returning them.

glibc takes each large block from the kernel and gives it back when it is freed. A training step allocates the same
tensors again and again, so that each step touches thousands of new pages, which the kernel must clear first. For a
small decoder that was 6 % of a step's CPU time.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
MMAP_THRESHOLD = 256 << 20
"""Bytes of a block from which on it is still returned as soon as it is freed: what is this large is rarely reused."""
TRIM_THRESHOLD = 1 << 30
"""Bytes of free memory at the end of the heap that the process keeps."""


def keep_freed_memory() -> bool:
    """Let malloc reuse freed blocks of up to `MMAP_THRESHOLD` bytes; return whether the C library can do that.

    The process keeps at most `TRIM_THRESHOLD` bytes more than without it. A C library without mallopt (musl, macOS)
    and an allocator that was preloaded (jemalloc, tcmalloc) stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # the threshold for trimming is a long in glibc, but mallopt takes an int
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
