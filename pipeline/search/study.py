"""Update the study of a sweep: read the results of its trials, decide what runs next, and create new trials.

No process runs between two decisions. Whoever ends a trial calls :func:`update_study`: the supervisor of the trial, or
the process that runs the stages on this machine. `submit` and `resume` call it also. A decision is a function of the
results (pipeline/search/schedule.py), so it does not matter which process makes it, or whether a process is killed
before it has recorded the decision.
"""

from __future__ import annotations

import os
from statistics import fmean

from pipeline.base.errors import ExitCode, UserError
from pipeline.config.search import SearchConfig, compute_rungs
from pipeline.run import stages
from pipeline.run.attempts import load_stage_state
from pipeline.run.directory import Run, create_points
from pipeline.run.events import Failed
from pipeline.run.lines import read_valid_lines
from pipeline.run.metrics import is_step_line
from pipeline.run.trials import STUDY_FILE, Result, Study, read_study, write_study
from pipeline.search.sampler import JOURNAL_FILE, sample_parameters, write_journal
from pipeline.search.schedule import plan

RESULT_CAUSES = frozenset({ExitCode.NON_FINITE.name.lower(), ExitCode.OUT_OF_MEMORY.name.lower()})
"""Causes of failures that follow from the parameters of a trial, so that its first failure is its result."""
TRAIN = "train"


def get_search(run: Run) -> SearchConfig | None:
    """Return the section `sweep.search` of a run; None if the run has no search."""
    sweep = run.config.sweep
    return None if sweep is None else sweep.search


def update_study(run: Run) -> Study:
    """Record the new results of the trials, decide which trials run next, and make the directories of new trials.

    The caller holds the lock of the run directory (`Run.lock_exclusively`).

    Args:
        run: the run of a sweep with a search.

    Raises:
        UserError: if Optuna is needed and not installed, or the config has other rungs than the study.
    """
    config = run.config
    search = get_search(run)
    assert search is not None and config.sweep is not None and config.train.steps is not None
    sweep = config.sweep
    rungs = compute_rungs(search, config.train.steps, config.train.evaluate_every)
    old = read_study(run.path)
    if old.rungs and old.rungs != tuple(rungs):
        raise UserError(
            "search.changed_rungs",
            f"{run.name}: the rungs of the search are steps {', '.join(map(str, old.rungs))}, but the config now gives "
            f"{', '.join(map(str, rungs))}: restore train.steps, train.evaluate_every and sweep.search",
        )
    results = {
        (number, rung): result for number, trial in enumerate(old.trials) for rung, result in trial.results.items()
    }
    points = create_points(run)
    for number, (trial, point) in enumerate(zip(old.trials, points, strict=True)):
        if trial.result is None and (result := read_result(point, rungs[trial.rung], search)) is not None:
            results[number, trial.rung] = result
    study = plan(
        rungs,
        trial_count=search.optuna.trials,
        workers=sweep.trials_at_once,
        eta=search.optuna.eta,
        results=results,
        sample=lambda number, trials: (
            old.trials[number].parameters
            if number < len(old.trials)
            else sample_parameters(config, search, sweep.seed, trials)
        ),
    )
    if study != old:
        write_study(run.path, study)
        create_points(run)
    if study != old or not _is_journal_current(run):
        write_journal(run.path, search, study)
    return study


def _is_journal_current(run: Run) -> bool:
    """Return True if Optuna's journal was written after the latest change of the study."""
    try:
        return os.stat(run.path / JOURNAL_FILE).st_mtime_ns >= os.stat(run.path / STUDY_FILE).st_mtime_ns
    except FileNotFoundError:
        return False


def read_result(point: Run, step: int, search: SearchConfig) -> Result | None:
    """Return the result of a trial at a rung; None if it has not reached the rung and may still do so.

    A failure whose cause is in `RESULT_CAUSES` is a result. Other failures may have other reasons than the parameters.
    Such a trial has no result until `resume` has retried it and it has failed again.

    Args:
        point: the run of the trial.
        step: the step of the rung.
        search: the section `sweep.search`.
    """
    # As long as a supervisor holds the lock, it still checks the outputs for the old rung.
    if point.lock_holder(TRAIN) is not None:
        return None
    if stages.load_stage_module(point, TRAIN).describe_missing_outputs(point) is None:
        return _read_metric(point, step, search)
    if not load_stage_state(point, TRAIN, None).has_failed:
        return None
    failures = [event for event in point.read_events(TRAIN, Failed) if event.final or event.cause in RESULT_CAUSES]
    if not failures or (len(failures) < 2 and failures[-1].cause not in RESULT_CAUSES):
        return None
    message = " ".join((failures[-1].message or "").splitlines()[:2])  # the first line may only name the rank
    return Result(None, message=f"{failures[-1].cause}: {message}"[:200])


def _read_metric(point: Run, step: int, search: SearchConfig) -> Result:
    """Return the metric of a trial at `step`, or before if a callback has completed the trial early."""
    lines = [line for line in read_valid_lines(point.metrics_file, is_step_line) if line["step"] <= step]
    last_step = lines[-1]["step"] if lines else 0
    is_final = last_step < step
    value: float | None = None
    if search.metric == "held_out_loss":
        values = {line["step"]: line["held_out_loss"] for line in lines if line.get("held_out_loss") is not None}
        newest = max(values, default=0)
        value = values[newest] if values and (is_final or newest == step) else None
    else:
        first_step = last_step - max(1, last_step // 10)
        losses = [line["loss"] for line in lines if line["step"] > first_step and line.get("loss") is not None]
        value = fmean(losses) if losses else None
    message = "" if value is not None else f"step {last_step} has no finite {search.metric}"
    return Result(value, is_final, message)
