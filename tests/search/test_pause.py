"""Test that a trial that pauses at each rung ends with the same bits as a run that does not pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.run.directory import Run, list_points
from pipeline.run.stages import list_point_stages, load_stage_module
from pipeline.run.trials import read_study
from pipeline.search.study import update_study
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank
from tests.train.test_exact import check_same_result
from tests.train.test_held_out import read_held_out_losses, run_stage_and_stop_during_evaluation

SEARCH = "sweep={search: {space: {optimizer.lr: [0.02]}, optuna: {trials: 1, min_steps: 4, startup_trials: 1}}}"
TRAINING = ("train.steps=16", "train.evaluate_every=4", "optimizer.lr=0.02", "stages.train.tasks_per_node=2")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a run with the config of the only trial, without pauses."""
    run = make_run(tmp_path_factory.mktemp("plain"), overrides=TRAINING)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


@pytest.mark.parametrize("is_stopped_at_rung", [False, True])
def test_pauses_do_not_change_the_result(tmp_path: Path, plain_run: Run, is_stopped_at_rung: bool) -> None:
    """The trial pauses after steps 4 and 12. With `is_stopped_at_rung`, it is stopped in the evaluation of step 4.

    The trial then has the checkpoint of the rung, but it has reached the rung only when the step is evaluated.
    """
    run = make_run(tmp_path, overrides=(*TRAINING, SEARCH), data=plain_run.data_dir)
    update_study(run)
    [trial] = list_points(run)
    if is_stopped_at_rung:
        assert run_ranks(2, run_stage_and_stop_during_evaluation, trial.path, "train", 4) == [ExitCode.STOPPED] * 2
        assert find_newest_step(trial.checkpoints_dir) == 4 and read_held_out_losses(trial) == {}
        assert load_stage_module(trial, "train").describe_missing_outputs(trial) is not None
        assert update_study(run).trials[0].rung == 0
    for rung, step in enumerate((4, 12, 16)):
        assert read_study(run.path).trials[0].rung == rung
        assert [*list_point_stages(trial)] == (["train", "evaluate"] if step == 16 else ["train"])
        assert run_ranks(2, run_stage_on_rank, trial.path, "train") == [ExitCode.DONE] * 2
        assert find_newest_step(trial.checkpoints_dir) == step == len(list(read_jsonl(trial.metrics_file)))
        study = update_study(run)
        assert study.trials[0].results[rung].value == read_held_out_losses(plain_run)[step]
    assert study.is_finished
    check_same_result(trial, plain_run)
    assert read_held_out_losses(trial) == read_held_out_losses(plain_run)
    assert [event["step"] for event in read_event_lines(trial, "train", "paused")] == [4, 12]
    assert "stopped_early" not in {event["event"] for event in read_event_lines(trial)}


def test_the_metric_may_be_the_loss_in_training(tmp_path: Path, plain_run: Run) -> None:
    """The value is the mean over the last tenth of the steps so far. No held-out evaluation is needed."""
    search = SEARCH.replace("search: {", "search: {metric: loss, ").replace("min_steps: 4", "min_steps: 12")
    overrides = (*TRAINING, search, "train.steps=24", "train.evaluate_every=", "optimizer.schedule=constant")
    run = make_run(tmp_path, overrides=overrides, data=plain_run.data_dir)
    for steps in (12, 24):
        update_study(run)
        [trial] = list_points(run)
        assert run_ranks(2, run_stage_on_rank, trial.path, "train") == [ExitCode.DONE] * 2
        assert len(list(read_jsonl(trial.metrics_file))) == steps
    losses = [line["loss"] for line in read_jsonl(trial.metrics_file)]
    results = update_study(run).trials[0].results
    assert results[0].value == losses[11]
    assert results[1].value == pytest.approx((losses[22] + losses[23]) / 2, rel=1e-12)
