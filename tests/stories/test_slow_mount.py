"""Test training data on slow shared storage: copies on the local disk of the node, and reads in threads.

These tests do not measure speed. benchmarks/throttled.py measures how long a run waits for data.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.throttled import create_run_on_mount, has_complete_copies, read_steps, start_training
from pipeline.base.errors import ExitCode
from pipeline.run.code import CODE_ROOT
from tests.support.events import read_event_lines
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.slow_mount import SlowMount, find_slow_mount_problem, slow_mount
from tests.support.tiny import slow_down_steps

pytestmark = [pytest.mark.story, pytest.mark.timeout(600)]

TOKENS = 16_000_000
"""Number of tokens. Each has two bytes."""
STEPS = 160
STEP_S = 0.15
"""Minimum seconds per step. The data loader reads up to ten seconds ahead, which are 67 steps."""


@pytest.fixture
def mount() -> Iterator[SlowMount]:
    """Yield a mounted file system whose read bandwidth a test can limit."""
    if reason := find_slow_mount_problem():
        skip_or_fail_in_ci(reason)
    with slow_mount(2 * TOKENS) as mount:
        yield mount


def test_copied_data_is_not_read_from_shared_storage_again(tmp_path: Path, mount: SlowMount) -> None:
    """When the copies are complete, the test limits the mount to one byte per second. Any further read takes minutes.

    To prove that the limit works, `cat` reads a file of the mount. `cat` must not end before the run.
    """
    (tmp_path / "disk").mkdir()
    overrides = (f"site.local_disk={tmp_path}/disk", f"train.steps={STEPS}", "train.threads=1")
    run = slow_down_steps(create_run_on_mount(mount, tmp_path, "run", TOKENS, *overrides), STEP_S)
    mount.drop_page_cache()
    mount.limit_reads(8_000_000)
    bytes_before = mount.count_bytes_read()
    process = start_training(mount, run, tmp_path / "log")
    try:
        deadline = time.monotonic() + 240
        while not has_complete_copies(run):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        mount.limit_reads(1)
        mount.drop_page_cache()
        step_count = len(read_steps(run))
        bytes_read = mount.count_bytes_read()
        assert bytes_read - bytes_before >= 2 * TOKENS * 0.95, (
            "the copies must be read from the mount, not from the page cache"
        )
        # A read of a row maps 64 KiB of the file, which then stay in memory. Before step 60, most of the 32 MB is not
        # mapped yet, so a run without copies would have to read the mount again.
        assert step_count < 60, "the copies were complete too late for this test"
        cat = subprocess.Popen(mount.wrap_command(["cat", f"{mount.folder}/tokens.bin"]), stdout=subprocess.DEVNULL)
        assert process.wait(120) == ExitCode.DONE, (tmp_path / "log").read_text()
        assert cat.poll() is None and mount.count_bytes_read() == bytes_read, "the run must not read the mount again"
        assert [line["step"] for line in read_steps(run)] == list(range(1, STEPS + 1))
    finally:
        mount.limit_reads(0)
        process.kill()
        process.wait(60)
    assert cat.wait(60) == 0
    (event,) = read_event_lines(run, "train", "local_copy")
    assert (event["files"], event["bytes"]) == (8, 2 * TOKENS) and not list((tmp_path / "disk").iterdir())


READ_ROWS = """
import sys, threading, time, types
import numpy as np
from pipeline.data.samples import MappedDataset

class Mapped(MappedDataset):
    def _map_samples(self, entry, path, whole):
        return {"rows": np.memmap(path, np.uint16, "r").reshape(-1, *map(int, sys.argv[2:]))}

data = Mapped([types.SimpleNamespace(file=sys.argv[1])])
rows = np.random.default_rng(0).permutation(len(data))[:40]
start = last_time = time.monotonic()
longest_pause = 0.0
reader = threading.Thread(target=data.read, args=(rows,))
reader.start()
while reader.is_alive():
    time.sleep(0.002)
    longest_pause = max(longest_pause, time.monotonic() - last_time)
    last_time = time.monotonic()
print(longest_pause, last_time - start)
"""
"""A program in which a thread reads random rows of a file.

The first argument is the path of the file. The further arguments are the shape of a row. Without them, a row is a
single value. The program prints the longest pause of the main thread and the total time, in seconds.
"""


@pytest.mark.parametrize("row_shape", [[], ["128"]])
def test_a_slow_read_of_short_rows_lets_other_threads_run(mount: SlowMount, row_shape: list[str]) -> None:
    """numpy keeps the GIL when it copies only a few values, even while it waits for a page of the file.

    `MappedDataset.read` must therefore read in a way that releases the GIL.
    """
    file = mount.folder / "rows"
    np.arange(1 << 20, dtype=np.uint16).tofile(file)
    mount.drop_page_cache()
    mount.limit_reads(200_000)
    command = mount.wrap_command([sys.executable, "-c", READ_ROWS, str(file), *row_shape])
    result = subprocess.run(command, cwd=CODE_ROOT, check=True, capture_output=True, text=True, timeout=120)
    longest_pause_s, total_s = map(float, result.stdout.split())
    assert total_s > 3 and longest_pause_s < total_s / 4, "a read must not block other threads"
