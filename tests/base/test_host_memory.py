"""Test that `keep_freed_memory` makes a process reuse freed blocks instead of mapping new pages."""

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
        bytes(bytearray(size))  # two blocks, written and freed
for _ in range(3):
    allocate_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    allocate_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(argument: str) -> int:
    """Run PROGRAM with this argument and return the number of page faults after its warm-up."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_freed_memory_is_reused() -> None:
    pages = 5 * (40 << 20) // 4096
    assert count_page_faults("return") > pages, "by default, glibc unmaps a block of 40 MiB when it is freed"
    assert count_page_faults("keep") < pages // 100
