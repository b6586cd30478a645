"""A pytest fixture that starts a test cluster for the tests of a module.

    from tests.cluster import Cluster
    from tests.cluster.fixture import cluster_fixture

    cluster = cluster_fixture(grace=5)

    def test_something(cluster: Cluster) -> None: ...

All tests of the module share one cluster, which starts in a second or two. A test should cancel its remaining jobs with
`cluster.clear()`. After the module, the cluster is removed, because it would slow down later tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, find_cluster_problem
from tests.cluster.config import Options
from tests.support.requirements import skip_or_fail_in_ci


def require_cluster(options: Options) -> None:
    """Skip the test if a cluster with these options cannot run on this machine. If CI=true, fail instead."""
    if reason := find_cluster_problem(options):
        skip_or_fail_in_ci(reason)


def cluster_fixture(**options: Any) -> Any:
    """Return a module-scoped fixture that starts a cluster with these :class:`Options` in a new directory."""
    cluster_options = Options(**options)

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        require_cluster(cluster_options)
        # The path of pytest's own temporary folder can be too long for a socket.
        directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
        with Cluster(directory).up(cluster_options) as running_cluster:
            yield running_cluster

    return cluster
