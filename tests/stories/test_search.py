"""Test a search on a Slurm cluster: preemptions change neither the trials nor their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run, list_points
from pipeline.run.trials import Study, read_study
from pipeline.search.sampler import JOURNAL_FILE
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import (
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
    wait_for_empty_queue,
)
from tests.support.events import read_event_lines
from tests.support.tiny import compute_run_digest, make_run, slow_down_steps, write_config

cluster = cluster_fixture(grace=1)

pytestmark = pytest.mark.timeout(900)

SEARCH = (
    "sweep={search: {space: {optimizer.lr: {low: 1.0e-3, high: 0.1}, optimizer.name: [adamw, sgd]}, "
    "optuna: {sampler: tpe, pruner: asha, trials: 12, storage: journal, min_steps: 4, startup_trials: 4}}, at_most: 4}"
)
OVERRIDES = (
    SEARCH, "train.steps=36", "train.evaluate_every=4", "stages.train.tasks_per_node=1",
    "stages.evaluate.tasks_per_node=1", "recovery.preflight=false",
)  # fmt: skip


def create_search(folder: Path, data: Path) -> Run:
    """Create the run of the search in `folder`. Its data directory is a link to `data`."""
    folder.mkdir(exist_ok=True)
    run = Run.create(load_config(write_config(folder), OVERRIDES))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    return run


def list_losses(trial: Run) -> list[tuple[float, float | None]]:
    """Return the loss and the held-out loss of each step of a trial."""
    return [(line["loss"], line.get("held_out_loss")) for line in read_jsonl(trial.metrics_file)]


def count_requeues(run: Run) -> int:
    """Return how often jobs of trials were requeued."""
    return sum(list_event_names(trial.path, "train").count("requeued") for trial in list_points(run))


def test_two_preemptions_change_neither_the_trials_nor_the_best_one(tmp_path: Path, cluster: Cluster) -> None:
    """Preempt all trials of a search twice, and compare the study with that of an undisturbed search here.

    The first preemption interrupts the first trials, the second one a trial that continues after a pause.
    """
    import optuna

    data = make_run(tmp_path).data_dir
    run = slow_down_steps(create_search(tmp_path / "cluster", data), 0.4)
    result = run_submit(cluster, tmp_path / "cluster", "tiny.yaml", *OVERRIDES)
    assert result.returncode == 0 and "array over 4 points" in result.stdout, result.stdout + result.stderr

    def read_trials() -> Study:
        return read_study(run.path)

    wait_for("a step of a first trial", lambda: any(list_losses(trial) for trial in list_points(run)))
    preempt_all_nodes(cluster)
    wait_for("the first requeue", lambda: count_requeues(run) >= 1, 60)
    first_requeues = count_requeues(run)

    def is_promoted_trial_running() -> bool:
        """Return True if a trial has continued after a pause and has not reached its next rung."""
        study = read_trials()
        return any(
            trial.rung and trial.result is None and len(list_losses(point)) > study.rungs[trial.rung - 1]
            for trial, point in zip(study.trials, list_points(run), strict=False)
        )

    wait_for("a step of a continued trial", is_promoted_trial_running)
    preempt_all_nodes(cluster)
    wait_for("the second requeue", lambda: count_requeues(run) > first_requeues, 60)
    wait_for("the end of the search", lambda: read_trials().is_finished, 600)
    best = read_trials().find_best()
    assert best is not None
    wait_for("the evaluation of the best trial", lambda: has_evaluation(list_points(run)[best].path))
    wait_for_empty_queue(cluster)

    undisturbed = create_search(tmp_path / "local", data)
    local = run_submit(None, tmp_path / "local", "tiny.yaml", *OVERRIDES, "--executor", "local")
    assert local.returncode == 0, local.stdout + local.stderr
    study = read_trials()
    assert study == read_study(undisturbed.path), "parameters, rungs and values are compared exactly"
    assert len(study.trials) == 12 and study.rungs == (4, 12, 36)
    assert [list_losses(trial) for trial in list_points(run)] == [
        list_losses(trial) for trial in list_points(undisturbed)
    ]
    assert compute_run_digest(list_points(run)[best]) == compute_run_digest(list_points(undisturbed)[best])
    for number, trial in enumerate(list_points(run)):
        pauses = [event["step"] for event in read_event_lines(trial, "train", "paused")]
        assert pauses == [4, 12][: len(pauses)], number
        assert len(pauses) == min(2, study.trials[number].rung + 1)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(run.path / JOURNAL_FILE)))
    journal = optuna.load_study(study_name="tiny", storage=storage)
    assert journal.best_trial.number == best
    assert journal.best_value == study.trials[best].results[2].value
    status = run_submit(cluster, tmp_path / "cluster", "status", "runs/tiny").stdout
    assert f"best trial: {best:03d}" in status and "pruned" in status, status
