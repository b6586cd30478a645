"""Tests of straggler detection, and of the list of bad nodes that jobs exclude."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from pipeline.base.dist_env import RankInfo
from pipeline.config.read import load_config
from pipeline.resilience import stragglers
from pipeline.resilience.stragglers import LocalComputeTimer, StragglerDetector
from pipeline.run.directory import Run
from pipeline.run.machines import get_compute_times_file
from slurm.query import current_job
from slurm.query.current_job import JobInfo, record_bad_node, select_bad_nodes
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank, write_config
from tracking.report import print_report


def train_with_slow_rank(rank_info: RankInfo, path: Path, slow_rank: int, last_slow_step: int) -> int:
    """Run the train stage on this rank. Up to `last_slow_step`, each forward pass of `slow_rank` takes 60 ms longer."""
    from pipeline.model import task

    cross_entropy_sum = task.cross_entropy_sum
    calls = 0

    def slow_cross_entropy_sum(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if rank_info.rank == slow_rank and calls <= last_slow_step * 2:  # A step has two micro-batches.
            time.sleep(0.06)
        return cross_entropy_sum(*arguments)  # type: ignore[arg-type]

    task.cross_entropy_sum = slow_cross_entropy_sum  # type: ignore[assignment]
    return run_stage_on_rank(rank_info, path, "train")


@pytest.mark.story
def test_slow_rank_is_reported_with_its_host_and_its_recovery(tmp_path: Path) -> None:
    """Rank 2 is slow in the first 14 steps. It is compared every third step, and reported after three comparisons."""
    run = make_run(tmp_path, overrides=("train.steps=120", "train.log_every=3", "stages.train.tasks_per_node=4"))
    run_ranks(4, train_with_slow_rank, run.path, 2, 14)
    events = [event for event in read_event_lines(run, "train", "straggler", "recovered") if event["rank"] == 2]
    # On a busy machine, any rank may be slow for a while. Therefore rank 2 can recover in many steps, and later events
    # are ignored.
    assert [event["event"] for event in events][:2] == ["straggler", "recovered"]
    assert events[0]["step"] == 9 and events[0]["ratio"] > 1.3 and events[0]["host"]
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert len(lines) == 120


def create_run(folder: Path, *overrides: str) -> Run:
    """Create a tiny run in `folder`, without data."""
    folder.mkdir(exist_ok=True)
    return Run.create(load_config(write_config(folder), overrides))


ALL_NODES = {f"n{number}": True for number in range(9)}
"""The nodes of the partition, and whether jobs can start on them."""


def test_bad_nodes_expire_and_leave_enough_nodes_for_the_job(tmp_path: Path) -> None:
    """Records expire after two hours, and at most three nodes are excluded.

    The last argument of `select_bad_nodes` is the number of nodes that the job needs.
    """
    run = create_run(tmp_path, "recovery.exclude_hours=2", "recovery.exclude_at_most=3")
    start = time.time()
    for number in range(5):
        record_bad_node(run, f"n{number}", "device memory")
    record_bad_node(run, "n1.cluster.example", "second record of n1")
    record_bad_node(run, "other", "not in this partition")
    assert select_bad_nodes([run], start + 60, ALL_NODES, [], 2) == ["n1", "n4", "n3"], (
        "expected the three newest records, without the second record of n1"
    )
    assert select_bad_nodes([run], start + 2 * 3600 + 60, ALL_NODES, [], 2) == [], (
        "the records must expire after two hours"
    )
    assert select_bad_nodes([run], start + 60, ALL_NODES, [], 8) == ["n1"], (
        "only one of nine nodes may be excluded, because the job needs eight"
    )
    assert select_bad_nodes([run], start + 60, ALL_NODES, ["n7"], 8) == [], (
        "n7 is already excluded by the user, so no other node may be excluded"
    )
    # The job needs all seven usable nodes. Excluding n4 is allowed, because the job cannot start on n4 anyway.
    assert select_bad_nodes([run], start + 60, {**ALL_NODES, "n4": False, "n7": False}, [], 7) == ["n4"]


def test_nodes_that_the_user_excludes_stay_excluded_and_bad_nodes_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config excludes n0 and n1. n1 and n5 are recorded as bad nodes. The records expire after two hours.

    `excluded_nodes_at_requeue` returns None if the list of excluded nodes does not change.
    """
    run = create_run(tmp_path, "site.sbatch.exclude=n[0-1]", "recovery.exclude_hours=2")
    monkeypatch.setattr(current_job, "run_slurm_command", lambda *_: "".join(f"n{n}|idle|low*\n" for n in range(9)))
    info = JobInfo(
        "RUNNING",
        restarts=0,
        is_preempted=False,
        time_left_s=None,
        is_batch=True,
        partition="low",
        excluded_nodes="n[0-1]",
    )
    assert current_job.excluded_nodes_at_submission([run], "train") == "n[0-1]"
    with monkeypatch.context() as patch:
        patch.setattr(current_job, "run_slurm_command", lambda *_: pytest.fail("Slurm must not be queried"))
        assert current_job.excluded_nodes_at_requeue(run, "train", info) is None
    record_bad_node(run, "n1", "device memory")
    record_bad_node(run, "n5", "device memory")
    assert set(str(current_job.excluded_nodes_at_submission([run], "train")).split(",")) == {"n[0-1]", "n5", "n1"}
    assert current_job.excluded_nodes_at_requeue(run, "train", info) == "n0,n1,n5"
    later = time.time() + 2 * 3600 + 60
    monkeypatch.setattr(current_job.time, "time", lambda: later)
    info_with_n8 = replace(info, excluded_nodes="n[0-1,5,8]")  # a user has excluded n8 with scontrol
    assert current_job.excluded_nodes_at_requeue(run, "train", info_with_n8) == "n0,n1,n8"
    run_without_exclude = create_run(tmp_path / "plain")
    record_bad_node(run_without_exclude, "n5", "device memory")
    monkeypatch.setattr(current_job.time, "time", lambda: later + 86400)
    info_with_n5 = replace(info, excluded_nodes="n5")
    assert current_job.excluded_nodes_at_requeue(run_without_exclude, "train", info_with_n5) == "", (
        "the record of n5 has expired"
    )
    assert current_job.excluded_nodes_at_submission([run_without_exclude], "train") is None


@pytest.fixture
def make_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int], str], StragglerDetector]:
    """Return a function that creates the StragglerDetector of rank 0.

    The arguments of the function are the pipeline rank of each rank, and a string in which each letter is the host of a
    rank.
    """

    def make(pipeline_ranks: Sequence[int], hosts: str) -> StragglerDetector:
        monkeypatch.setattr(stragglers, "all_gather_results", lambda *_: list(hosts))
        timer = LocalComputeTimer(torch.device("cpu"))
        return StragglerDetector(create_run(tmp_path), cast(dist.ProcessGroup, None), pipeline_ranks, timer)

    return make


@pytest.mark.parametrize(
    ("ratios", "event_names"),  # ratios of the compute time of rank 2 to the median, for each check
    [
        ([1.4, 1.2] * 20, []),
        ([1.4] * 3 + [1.0, 1.4, 1.4, 1.0] * 20, ["straggler"]),
        ([1.4] * 9 + [1.2] * 9, ["straggler"]),
        ([1.4] * 3 + [1.1] * 3 + [1.2] * 9, ["straggler", "recovered"]),
        ([1.4] * 3 + [1.1] * 3 + [1.4] * 2 + [1.1] + [1.4] * 3, ["straggler", "recovered", "straggler"]),
    ],
)
def test_rank_near_the_limits_is_not_reported_repeatedly(
    make_detector: Callable[[Sequence[int], str], StragglerDetector], ratios: list[float], event_names: list[str]
) -> None:
    """A rank is slow after three checks in a row above 1.3, and has recovered after three in a row below 1.15."""
    detector = make_detector([0, 0, 0], "abc")
    for step, ratio in enumerate(ratios):
        detector.update_stragglers(step, [1.0, 1.0, ratio])
    assert [event["event"] for event in read_event_lines(detector.run, "train")] == event_names


@pytest.mark.parametrize(
    ("seconds", "expected_stragglers"),
    [([1, 1, 1, 2], [3]), ([1, 1, 2, 2], []), ([5, 1, 2, 2], [0]), ([4, 1, 2, 9], [0, 3])],
)
def test_only_ranks_of_the_same_pipeline_stage_are_compared(
    make_detector: Callable[[Sequence[int], str], StragglerDetector],
    seconds: list[float],
    expected_stragglers: list[int],
) -> None:
    """Ranks 0 and 1 have the first pipeline-parallel stage, ranks 2 and 3 the second one.

    `seconds` has the compute time of each rank. The median of two times is the smaller one.
    """
    detector = make_detector([0, 0, 1, 1], "abcd")
    run = detector.run
    for step in (1, 2, 3, 4):
        detector.update_stragglers(step, seconds)
    assert [event["rank"] for event in read_event_lines(run, "train", "straggler")] == expected_stragglers
    medians = [min(seconds[:2])] * 2 + [min(seconds[2:])] * 2
    ratios = {host: time / median for host, time, median in zip("abcd", seconds, medians, strict=True)}
    assert json.loads(get_compute_times_file(run.jobs_dir).read_bytes()) == ratios
    console = Console(width=200, record=True)
    print_report(run, console)
    slowest_host = max(ratios, key=lambda host: ratios[host])
    assert f"{slowest_host} {ratios[slowest_host]:.2f}, " in console.export_text()
