"""A rank that is slow by itself is told from those that wait for it; excluded nodes expire and are capped."""

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
from tests.support.tiny import make_run, stage_rank, write_config
from tracking.report import print_report


def train_with_a_slow_rank(rank_info: RankInfo, path: Path, slow: int, until: int) -> int:
    """Rank `slow` takes 60 ms more for its forward pass in steps before `until`."""
    from pipeline.model import task

    cross_entropy_sum = task.cross_entropy_sum
    calls = 0

    def delayed(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if rank_info.rank == slow and calls <= until * 2:  # two micro-batches a step
            time.sleep(0.06)
        return cross_entropy_sum(*arguments)  # type: ignore[arg-type]

    task.cross_entropy_sum = delayed  # type: ignore[assignment]
    return stage_rank(rank_info, path, "train")


def test_the_slow_rank_is_named_with_its_host_and_its_recovery(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("train.steps=120", "train.log_every=3", "stages.train.tasks_per_node=4"))
    run_ranks(4, train_with_a_slow_rank, run.path, 2, 14)
    told = [e for e in read_event_lines(run, "train") if e["event"] in ("straggler", "recovered") and e["rank"] == 2]
    # on a busy machine any rank may be slow for a while: it has many chances to recover, and may be slow again
    assert [e["event"] for e in told][:2] == ["straggler", "recovered"]
    assert told[0]["step"] == 9 and told[0]["ratio"] > 1.3 and told[0]["host"]
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert len(lines) == 120


def config_run(folder: Path, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return Run.create(load_config(write_config(folder), overrides))


UP = {f"n{number}": True for number in range(9)}


def test_nodes_to_avoid_expire_and_never_starve_the_job(tmp_path: Path) -> None:
    run = config_run(tmp_path, "recovery.exclude_hours=2", "recovery.exclude_at_most=3")
    start = time.time()
    for number in range(5):
        record_bad_node(run, f"n{number}", "device memory")
    record_bad_node(run, "n1.cluster.example", "again")
    record_bad_node(run, "gone", "no node of this partition")
    assert select_bad_nodes([run], start + 60, UP, [], 2) == ["n1", "n4", "n3"], "the newest ones, each once"
    assert select_bad_nodes([run], start + 2 * 3600 + 60, UP, [], 2) == []
    assert select_bad_nodes([run], start + 60, UP, [], 8) == ["n1"], "eight of nine are needed"
    assert select_bad_nodes([run], start + 60, UP, ["n7"], 8) == [], "a person excludes one already"
    assert select_bad_nodes([run], start + 60, {**UP, "n4": False, "n7": False}, [], 7) == ["n4"], "two are down"


def test_a_persons_list_stays_and_expired_nodes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config_run(tmp_path, "site.sbatch.exclude=n[0-1]", "recovery.exclude_hours=2")
    monkeypatch.setattr(current_job, "run_slurm_command", lambda *words: "".join(f"n{n}|idle|low*\n" for n in range(9)))
    facts = JobInfo("RUNNING", 0, False, None, True, partition="low", excluded_nodes="n[0-1]")
    assert current_job.excluded_nodes_at_submission([run], "train") == "n[0-1]"
    with monkeypatch.context() as silent:
        silent.setattr(current_job, "run_slurm_command", lambda *words: pytest.fail("the whole partition is asked for"))
        assert current_job.excluded_nodes_at_requeue(run, "train", facts) is None
    record_bad_node(run, "n1", "device memory")
    record_bad_node(run, "n5", "device memory")
    assert set(str(current_job.excluded_nodes_at_submission([run], "train")).split(",")) == {"n[0-1]", "n5", "n1"}
    assert current_job.excluded_nodes_at_requeue(run, "train", facts) == "n0,n1,n5"
    later = time.time() + 2 * 3600 + 60
    monkeypatch.setattr(current_job.time, "time", lambda: later)
    there = replace(facts, excluded_nodes="n[0-1,5,8]")  # n8: by a script's own option
    assert current_job.excluded_nodes_at_requeue(run, "train", there) == "n0,n1,n8"
    plain = config_run(tmp_path / "plain")
    record_bad_node(plain, "n5", "device memory")
    monkeypatch.setattr(current_job.time, "time", lambda: later + 86400)
    assert current_job.excluded_nodes_at_requeue(plain, "train", replace(facts, excluded_nodes="n5")) == "", (
        "the list is emptied"
    )
    assert current_job.excluded_nodes_at_submission([plain], "train") is None


@pytest.fixture
def make_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int], str], StragglerDetector]:
    """Return a function that makes the detector of rank 0 from the peers and hosts of all ranks."""

    def make(peers: Sequence[int], hosts: str) -> StragglerDetector:
        monkeypatch.setattr(stragglers, "all_gather_results", lambda *_: list(hosts))
        timer = LocalComputeTimer(torch.device("cpu"))
        return StragglerDetector(config_run(tmp_path), cast(dist.ProcessGroup, None), peers, timer)

    return make


@pytest.mark.parametrize(
    ("ratios", "events"),
    [
        ([1.4, 1.2] * 20, []),
        ([1.4] * 3 + [1.0, 1.4, 1.4, 1.0] * 20, ["straggler"]),
        ([1.4] * 9 + [1.2] * 9, ["straggler"]),
        ([1.4] * 3 + [1.1] * 3 + [1.2] * 9, ["straggler", "recovered"]),
        ([1.4] * 3 + [1.1] * 3 + [1.4] * 2 + [1.1] + [1.4] * 3, ["straggler", "recovered", "straggler"]),
    ],
)
def test_a_rank_near_the_limits_is_not_reported_repeatedly(
    make_detector: Callable[[Sequence[int], str], StragglerDetector], ratios: list[float], events: list[str]
) -> None:
    detector = make_detector([0, 0, 0], "abc")
    for step, ratio in enumerate(ratios):
        detector.update_stragglers(step, [1.0, 1.0, ratio])
    assert [e["event"] for e in read_event_lines(detector.run, "train")] == events


@pytest.mark.parametrize(
    ("own", "named"), [([1, 1, 1, 2], [3]), ([1, 1, 2, 2], []), ([5, 1, 2, 2], [0]), ([4, 1, 2, 9], [0, 3])]
)
def test_only_ranks_with_the_same_work_are_compared(
    make_detector: Callable[[Sequence[int], str], StragglerDetector], own: list[float], named: list[int]
) -> None:
    """Ranks 0 and 1 have one pipeline stage, 2 and 3 another; of two peers the faster one counts."""
    detector = make_detector([0, 0, 1, 1], "abcd")
    run = detector.run
    for step in (1, 2, 3, 4):
        detector.update_stragglers(step, own)
    assert [e["rank"] for e in read_event_lines(run, "train") if e["event"] == "straggler"] == named
    medians = [min(own[:2])] * 2 + [min(own[2:])] * 2
    ratios = {host: time / median for host, time, median in zip("abcd", own, medians, strict=True)}
    assert json.loads(get_compute_times_file(run.jobs_dir).read_bytes()) == ratios
    console = Console(width=200, record=True)
    print_report(run, console)
    worst = max(ratios, key=lambda host: ratios[host])
    assert f"slowest first: {worst} {ratios[worst]:.2f}, " in console.export_text()
