"""A rank that is slow by itself is told from those that wait for it; excluded nodes expire and are capped."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipeline.config_file import load_config
from pipeline.run import Run
from slurm.environment import Place
from slurm.recovery import bad_nodes, remember_bad_node
from tests.ranks import run_ranks
from tests.tiny import make_run, stage_rank, write_config


def train_with_a_slow_rank(place: Place, path: Path, slow: int, until: int) -> int:
    """Rank `slow` takes 60 ms more for its forward pass in steps before `until`."""
    from pipeline import task

    loss_sum = task.loss_sum
    calls = 0

    def delayed(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if place.rank == slow and calls <= until * 2:  # two micro-batches a step
            time.sleep(0.06)
        return loss_sum(*arguments)  # type: ignore[arg-type]

    task.loss_sum = delayed  # type: ignore[assignment]
    return stage_rank(place, path, "train")


def test_the_slow_rank_is_named_with_its_host_and_its_recovery(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("train.steps=24", "train.log_every=3", "stages.train.tasks_per_node=4"))
    run_ranks(4, train_with_a_slow_rank, run.path, 2, 14)
    told = [e for e in run.read_events("train") if e["event"] in ("straggler", "recovered") and e["rank"] == 2]
    assert [e["event"] for e in told] == ["straggler", "recovered"], "others may be slow for a while on a busy machine"
    assert told[0]["step"] == 9 and told[0]["ratio"] > 1.3 and told[0]["host"]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert len(lines) == 24


def config_run(folder: Path, *overrides: str) -> Run:
    return Run.create(load_config(write_config(folder), overrides))


def test_nodes_to_avoid_expire_and_never_starve_the_job(tmp_path: Path) -> None:
    run = config_run(tmp_path, "recovery.exclude_hours=2", "recovery.exclude_at_most=3")
    start = time.time()
    for number in range(5):
        remember_bad_node(run, f"n{number}", "device memory")
    remember_bad_node(run, "n1", "again")
    assert bad_nodes(run, start + 60) == ["n1", "n4", "n3"], "the newest ones, each once"
    assert bad_nodes(run, start + 2 * 3600 + 60) == []


@pytest.mark.parametrize(
    ("own", "named"), [([1, 1, 1, 2], [3]), ([1, 1, 2, 2], []), ([5, 1, 2, 2], [0]), ([4, 1, 2, 9], [0, 3])]
)
def test_only_ranks_with_the_same_work_are_compared(tmp_path: Path, own: list[float], named: list[int]) -> None:
    """Ranks 0 and 1 hold one pipeline stage, 2 and 3 another; of two peers the faster one counts."""
    from pipeline.stragglers import Stragglers

    run = config_run(tmp_path)
    judge = Stragglers.__new__(Stragglers)
    judge.run, judge.peers, judge.hosts, judge._slow = run, [0, 0, 1, 1], ["a", "b", "c", "d"], {}
    for step in (1, 2, 3, 4):
        judge.judge(step, own)
    assert [e["rank"] for e in run.read_events("train") if e["event"] == "straggler"] == named
