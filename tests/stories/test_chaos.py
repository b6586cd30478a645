"""Test that a run survives injected faults. `make test-long` tests each kind of fault, and random sequences."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.driver import ChaosRun, FaultResult, choose_faults, compute_undisturbed_digest, mount_small_disk
from tests.chaos.faults import Fault
from tests.cluster import Cluster, Options
from tests.cluster.fixture import require_cluster

ALL_FAULTS = (
    faults.kill_a_rank,
    faults.stop_a_rank,
    faults.requeue_the_job,
    faults.remove_a_checkpoint_file,
    faults.kill_an_agent,
    faults.kill_a_rank_and_an_agent,
    faults.damage_a_snapshot,
    faults.kill_a_rank_and_crash_a_node,
    faults.preempt,
    faults.make_a_loss_nan,
    faults.preempt_without_grace,
    faults.kill_a_rank_in_a_save,
    faults.hang_a_rank,
    faults.damage_a_checkpoint,
    faults.skew_a_clock,
    faults.send_a_signal,
    faults.kill_the_supervisor,
    faults.freeze_the_controller,
    faults.lose_the_controller_state,
    faults.fill_the_disk,
    faults.reach_the_time_limit,
    faults.crash_a_node,
    faults.disconnect_a_node,
)
EIGHT_FAULTS = (
    faults.kill_a_rank,
    faults.preempt,
    faults.make_a_loss_nan,
    faults.hang_a_rank,
    faults.damage_a_checkpoint,
    faults.kill_the_supervisor,
    faults.lose_the_controller_state,
    faults.disconnect_a_node,
)
"""Faults that end the attempt with different causes, for `make test-cluster`."""


def survive_faults(
    copy_folder: Path,
    sequence: Sequence[Fault],
    seed: int,
    netns: bool = False,
    compare_on_cluster: bool = False,
) -> list[FaultResult]:
    """Train a run on a new cluster, inject these faults, and check the result. Fail with a list of all problems.

    Args:
        copy_folder: folder for a copy of the run directory, to find the reason of a failure.
        sequence: the faults, in order.
        seed: seed of random choices.
        netns: give each node its own network namespace, which `disconnect_a_node` needs.
        compare_on_cluster: train the undisturbed run on the cluster instead of on this machine.

    Returns:
        The result of each fault.
    """
    options = Options(grace=1, user_signal=False, slurmd_timeout=5, netns=netns)
    require_cluster(options)
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    with mount_small_disk() as folder, Cluster(directory).up(options) as cluster:
        chaos_run = ChaosRun(cluster, folder, seed, len(sequence))
        try:
            results = chaos_run.run_faults(sequence)
            reference_cluster = cluster if compare_on_cluster else None
            digest = compute_undisturbed_digest(folder / "undisturbed", chaos_run, reference_cluster)
            problems = chaos_run.find_problems(results, digest)
        finally:
            shutil.copytree(chaos_run.run.path, copy_folder / "run", symlinks=True)
    assert not problems, "\n".join(problems)
    return results


@pytest.mark.story
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "sequence", [pytest.param(EIGHT_FAULTS, id="eight"), pytest.param(ALL_FAULTS, id="all", marks=pytest.mark.long)]
)
def test_a_run_survives_each_kind_of_fault(tmp_path: Path, sequence: Sequence[Fault]) -> None:
    assert {*ALL_FAULTS} == {*faults.QUICK_FAULTS, *faults.SLOW_FAULTS}
    results = survive_faults(tmp_path, sequence, seed=11, netns=True)
    assert [result.fault for result in results] == [fault.__name__ for fault in sequence]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(1, 14))
def test_a_run_survives_random_faults(tmp_path: Path, seed: int) -> None:
    sequence = choose_faults(seed, 8)
    survive_faults(tmp_path, sequence, seed, netns=faults.disconnect_a_node in sequence)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_run_survives_three_preemptions_on_four_nodes(tmp_path: Path) -> None:
    survive_faults(tmp_path, [faults.preempt] * 3, seed=5, compare_on_cluster=True)
