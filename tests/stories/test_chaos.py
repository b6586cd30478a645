"""Every kind of fault, and what must hold after it: one story of all kinds, and drawn ones (`make test-long`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.driver import Story, Told, draw, small_disk, undisturbed
from tests.chaos.faults import Scene
from tests.cluster import Cluster, Options
from tests.cluster.fixture import require

SHORT = (
    faults.kill_a_rank,
    faults.preempt,
    faults.poison_a_step,
    faults.preempt_without_grace,
    faults.die_in_a_save,
    faults.sleep_for_ever,
    faults.damage_the_newest_checkpoint,
    faults.skew_a_clock,
    faults.send_a_signal,
    faults.kill_the_supervisor,
    faults.freeze_the_controller,
    faults.lose_the_state,
    faults.fill_the_disk,
    faults.time_limit,
    faults.crash_a_node,
    faults.cut_a_network,
)


def live_through(
    keep: Path,
    chosen: Sequence[Callable[[Scene], str | None]],
    seed: int,
    netns: bool = False,
    compare_on_cluster: bool = False,
) -> list[Told]:
    """A training through these faults on a cluster of its own; fails with everything that is wrong afterwards.

    A copy of the run stays in `keep`. The undisturbed run is made on this machine, or on the cluster too.
    """
    options = Options(grace=1, user_signal=False, slurmd_timeout=5, netns=netns)
    require(options)
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    with small_disk() as folder, Cluster(directory).up(options) as cluster:
        story = Story(cluster, folder, seed, len(chosen))
        try:
            told = story.go(chosen)
            wrong = story.check(told, undisturbed(folder / "calm", story, cluster if compare_on_cluster else None))
        finally:
            shutil.copytree(story.run.path, keep / "run", symlinks=True)
    assert not wrong, "\n".join(wrong)
    return told


@pytest.mark.story
@pytest.mark.timeout(1500)
def test_one_of_each_kind(tmp_path: Path) -> None:
    told = live_through(tmp_path, SHORT, seed=11, netns=True)
    assert {t.fault for t in told} == {f.__name__ for f in (*faults.QUICK, *faults.SLOW)}


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(1, 14))
def test_drawn_faults(tmp_path: Path, seed: int) -> None:
    chosen = draw(seed, 8)
    live_through(tmp_path, chosen, seed, netns=faults.cut_a_network in chosen)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_preempted_three_times_on_four_nodes(tmp_path: Path) -> None:
    live_through(tmp_path, [faults.preempt] * 3, seed=5, compare_on_cluster=True)
