"""Tests that `keep_freed_memory` makes a process reuse freed blocks instead of mapping new pages."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
from pipeline.base.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def allocate_and_free():
    for size in (8 << 20, 40 << 20, 24 << 20):
        bytes(bytearray(size))  # this allocates, writes and frees two blocks of `size` bytes
for _ in range(3):
    allocate_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    allocate_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Program that prints the number of minor page faults, which map new pages, after three warm-up rounds."""


def count_page_faults(argument: str) -> int:
    """Run PROGRAM, with `keep_freed_memory` if the argument is "keep", and return the number that it prints."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_freed_memory_is_reused_after_keep_freed_memory() -> None:
    page_count = 5 * (40 << 20) // 4096  # five blocks of 40 MiB
    assert count_page_faults("default") > page_count, "by default, glibc unmaps a block of 40 MiB when it is freed"
    assert count_page_faults("keep") < page_count // 100
