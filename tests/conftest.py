"""Fixtures and hooks for all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.cluster import Cluster
from tests.support.requirements import skip_or_fail_in_ci

SLOW_FILES = (
    "test_chaos", "test_local_runs", "test_parallel", "test_slurm", "test_sweep", "test_slurm_parallel",
    "test_slurm_views", "test_restart_in_place", "test_slurm_salloc", "test_preemption", "test_resume",
    "test_succession", "test_mpi_launch", "test_site_cluster", "test_user_model", "test_ownership", "test_agents",
    "test_user_errors", "test_submission_checks", "test_spare_nodes", "test_drill", "test_search",
)  # fmt: skip
"""Names of test files that take long, most of them because they wait for Slurm or for other processes.

They start first, so that no worker runs a long file at the end, and other tests use the cores while these tests wait.
"""

# Tests run many processes on few cores. With more threads per process, the threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("sluice", deadline=None)  # the default, 200 ms per example, is too short on busy cores
settings.load_profile("sluice")


def uses_cluster(item: pytest.Item) -> bool:
    """Return True if a test needs a fixture of tests.cluster.fixture, directly or through other fixtures."""
    definitions_by_name = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    modules = {
        definitions[-1].func.__module__ for definitions in definitions_by_name.values()
    }  # pytest uses the last one
    return "tests.cluster.fixture" in modules


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker `story` to tests that use a cluster, except those with the marker `short`.

    Also move the tests of SLOW_FILES to the beginning.
    """
    for item in items:
        if uses_cluster(item) and not item.get_closest_marker("short"):
            item.add_marker("story")
    position_by_name = {name: position for position, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: position_by_name.get(item.path.stem, len(SLOW_FILES)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Add the state of Slurm and the logs of the runs to the report of a test that failed on a cluster.

    The cluster is removed after the test, so its state and its logs cannot be read later.
    """
    outcome = yield
    report = outcome.get_result()
    arguments = getattr(item, "funcargs", {})
    cluster = arguments.get("cluster")
    if not report.failed or not isinstance(cluster, Cluster):
        return
    for command in (["squeue", "--states=all"], ["sinfo", "-N", "-o", "%N %T %E"]):
        with suppress(Exception):
            report.sections.append((" ".join(command), cluster.output(command)))
    # each log file, and the number of its last lines to show
    files = [(file, 60) for file in sorted((cluster.directory / "log").glob("*.log"))]
    if folder := arguments.get("tmp_path"):
        for pattern, line_count in ("runs/*/events.jsonl", 12), ("*.log", 80), ("runs/*/jobs/*/*.log", 40):
            files += [(file, line_count) for file in sorted(Path(folder).glob(pattern))]
    for file, line_count in files:
        lines = file.read_text(errors="replace").splitlines()[-line_count:]
        report.sections.append((str(file), "\n".join(line[:500] for line in lines)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 12 MB during the test, enough for a copy of the code and a few tiny checkpoints."""
    if os.geteuid() != 0:
        skip_or_fail_in_ci("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)
