"""Copies on the node's own disk against shared storage that is slow, and then gives nothing at all: what the training
waits for is in benchmarks/throttled.py, here is what cannot depend on the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.throttled import copied, run_on, start, steps_of
from pipeline.base.errors import ExitCode
from pipeline.run.code import CODE_ROOT
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.slow_mount import SlowMount, find_slow_mount_problem, slow_mount
from tests.support.tiny import slow_down_steps

pytestmark = [pytest.mark.story, pytest.mark.timeout(600)]

TOKENS, STEPS, STEP_S = 16_000_000, 160, 0.15  # a reader is ten seconds ahead: 67 of the steps


@pytest.fixture
def mount() -> Iterator[SlowMount]:
    if reason := find_slow_mount_problem():
        skip_or_fail_in_ci(reason)
    with slow_mount(2 * TOKENS) as made:
        yield made


def test_what_is_copied_is_not_read_from_shared_storage_again(tmp_path: Path, mount: SlowMount) -> None:
    """Once the copies are there, the mount gives a byte a second: who asked it for one would wait for minutes."""
    (tmp_path / "disk").mkdir()
    more = (f"site.local_disk={tmp_path}/disk", f"train.steps={STEPS}", "train.threads=1")
    run = slow_down_steps(run_on(mount, tmp_path, "run", TOKENS, *more), STEP_S)
    mount.drop_page_cache()
    mount.limit_reads(8_000_000)
    before, process = mount.count_bytes_read(), start(mount, run, tmp_path / "log")
    try:
        deadline = time.monotonic() + 240
        while not copied(run):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        mount.limit_reads(1)
        mount.drop_page_cache()
        done, read = len(steps_of(run)), mount.count_bytes_read()
        assert read - before >= 2 * TOKENS * 0.95, "the copies were made from there, not from the page cache"
        # each row brings 64 KiB of the file, which stay where they are mapped; of 32 MB most is left then
        assert done < 60, "too late: what is left may have been read before"
        reader = subprocess.Popen(mount.run_in_group(["cat", f"{mount.folder}/tokens.bin"]), stdout=subprocess.DEVNULL)
        assert process.wait(120) == ExitCode.DONE, (tmp_path / "log").read_text()
        assert reader.poll() is None and mount.count_bytes_read() == read, "who reads the mount still waits"
        assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))
    finally:
        mount.limit_reads(0)
        process.kill()
        process.wait(60)
    assert reader.wait(60) == 0
    (told,) = run.read_events("train", "local_copy")
    assert (told["files"], told["bytes"]) == (8, 2 * TOKENS) and not list((tmp_path / "disk").iterdir())


READS = """
import sys, threading, time, types
import numpy as np
from pipeline.data.samples import MappedDataset

class Mapped(MappedDataset):
    def _map(self, entry, path, whole):
        return {"rows": np.memmap(path, np.uint16, "r").reshape(-1, *map(int, sys.argv[2:]))}

data = Mapped([types.SimpleNamespace(file=sys.argv[1])])
wanted = np.random.default_rng(0).permutation(len(data))[:40]
began = last = time.monotonic()
longest, reader = 0.0, threading.Thread(target=data.read, args=(wanted,))
reader.start()
while reader.is_alive():
    time.sleep(0.002)
    longest, last = max(longest, time.monotonic() - last), time.monotonic()
print(longest, last - began)
"""


@pytest.mark.parametrize("row", [[], ["128"]])
def test_a_slow_read_of_short_rows_lets_other_threads_run(mount: SlowMount, row: list[str]) -> None:
    """numpy's plain copies of few numbers hold Python's lock while a page comes, and with it the step."""
    file = mount.folder / "rows"
    np.arange(1 << 20, dtype=np.uint16).tofile(file)
    mount.drop_page_cache()
    mount.limit_reads(200_000)
    command = mount.run_in_group([sys.executable, "-c", READS, str(file), *row])
    done = subprocess.run(command, cwd=CODE_ROOT, check=True, capture_output=True, text=True, timeout=120)
    longest, took = map(float, done.stdout.split())
    assert took > 3 and longest < took / 4, "a read stops the other threads"
