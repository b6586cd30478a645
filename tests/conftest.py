"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.support.requirements import skip_or_fail_in_ci

LONGEST_FIRST = (
    "test_chaos", "test_doors", "test_slurm", "test_sweep", "test_slurm_parallel", "test_slurm_views",
    "test_slurm_salloc", "test_preemption", "test_resume", "test_succession", "test_mpi_launch",
    "test_site_cluster", "test_parallel",
)  # fmt: skip
"""Files that mostly wait, for Slurm or others: begun first, they end while others compute."""

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # many processes on few cores: their threads would only wait for each other


def uses_cluster(item: pytest.Item) -> bool:
    """Whether a test needs a fixture that tests.cluster.fixture made, itself or through others."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(fixture[-1].func.__module__ == "tests.cluster.fixture" for fixture in known.values())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: workers take whole ones, one after another. What runs on a cluster is a story."""
    for item in items:
        if uses_cluster(item) and not item.get_closest_marker("short"):
            item.add_marker("story")
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """To the report of a test that failed on a cluster, add what Slurm and the runs say: nobody can ask them later."""
    outcome = yield
    report = outcome.get_result()
    arguments = getattr(item, "funcargs", {})
    cluster = arguments.get("cluster")
    if not report.failed or not isinstance(cluster, Cluster):
        return
    for command in (["squeue", "--states=all"], ["sinfo", "-N", "-o", "%N %T %E"]):
        with suppress(Exception):
            report.sections.append((" ".join(command), cluster.output(command)))
    files = [(file, 60) for file in sorted((cluster.directory / "log").glob("*.log"))]
    if folder := arguments.get("tmp_path"):
        for pattern, last in ("runs/*/events.jsonl", 12), ("*.log", 80), ("runs/*/jobs/*/*.log", 40):
            files += [(file, last) for file in sorted(Path(folder).glob(pattern))]
    for file, last in files:
        lines = file.read_text(errors="replace").splitlines()[-last:]
        report.sections.append((str(file), "\n".join(line[:500] for line in lines)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of nine megabytes: a copy of the code, and a few tiny checkpoints."""
    if os.geteuid() != 0:
        skip_or_fail_in_ci("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)
