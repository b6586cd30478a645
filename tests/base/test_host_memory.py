"""A rank on the CPU reuses the memory that it freed, instead of asking the kernel for new pages in each step."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
from pipeline.base.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    for size in (8 << 20, 40 << 20, 24 << 20):
        bytes(bytearray(size))  # two blocks, written and freed
for _ in range(3):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(argument: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_is_reused() -> None:
    pages = 5 * (40 << 20) // 4096
    assert count_page_faults("return") > pages, "glibc returns a block of 40 MB by default"
    assert count_page_faults("keep") < pages // 100
