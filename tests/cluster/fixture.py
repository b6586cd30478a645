"""A pytest fixture that is a cluster.

    from tests.cluster import Cluster
    from tests.cluster.fixture import cluster_fixture

    cluster = cluster_fixture(grace=5)

    def test_something(cluster: Cluster) -> None: ...

One cluster serves all tests of the module, which leave it as they found it (`cluster.clear()`): a bring-up
takes a second or two, and a cluster that outlives its module would only take time from the tests after it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.cluster.config import Options
from tests.support.requirements import skip_or_fail_in_ci


def require(options: Options) -> None:
    """Skip the tests, with the reason, where such a cluster cannot run; fail them with CI=true."""
    if reason := missing(options):
        skip_or_fail_in_ci(reason)


def cluster_fixture(**options: Any) -> Any:
    """A module-scoped fixture: a cluster with these :class:`Options`, in a fresh directory of its own."""
    wanted = Options(**options)

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        require(wanted)
        # Not pytest's own folder: its path can be too long for a socket.
        directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
        with Cluster(directory).up(wanted) as up:
            yield up

    return cluster
