"""Test the study of a search: its results, its record, Optuna's samples and journal, and invalid configs."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.submit import check_submission, print_plan
from pipeline.base.console import PlainConsole
from pipeline.base.errors import InputError
from pipeline.config.read import ConfigError, load_config
from pipeline.run.directory import Run, list_point_values, list_points
from pipeline.run.trials import STUDY_FILE, Result, Study, Trial, read_study
from pipeline.search import study as study_module
from pipeline.search.sampler import JOURNAL_FILE, sample_parameters
from pipeline.search.study import update_study
from slurm.query.status import print_status
from slurm.submit.chain import Chain
from tests.checkpoint.test_retention import write_checkpoint
from tests.support.errors import raises_error
from tests.support.events import write_event
from tests.support.tiny import write_config
from tracking.report import print_report

SPACE = "space: {optimizer.lr: {low: 1.0e-3, high: 0.1}, model.layers: {low: 1, high: 4, type: int}}"
SEARCH = (
    f"sweep={{search: {{{SPACE}, optuna: {{trials: 8, min_steps: 2, startup_trials: 2}}}}, at_most: 3}}",
    "train.steps=18", "train.evaluate_every=2",
)  # fmt: skip


def create_search(folder: Path, *overrides: str) -> Run:
    """Create the run of a search with the rungs 2, 6 and 18."""
    folder.mkdir(exist_ok=True)
    return Run.create(load_config(write_config(folder), [*SEARCH, *overrides]))


def end_trial(run: Run, number: int) -> None:
    """Write what the training of a trial to its next rung leaves. The loss is a function of the parameters."""
    point = list_points(run)[number]
    trial = point.trial
    assert trial is not None
    lr = trial.parameters["optimizer.lr"]
    step = point.pause_step or 18
    lines: list[dict[str, Any]] = [
        {"step": number + 1, "loss": 1.0, "step_time_s": 1.0, "tokens_per_s": 1.0} for number in range(step)
    ]
    lines[-1]["held_out_loss"] = abs(lr - 0.02) + trial.parameters["model.layers"] / 100 + 1 / step
    point.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_checkpoint(point.checkpoints_dir, step)
    if point.pause_step is not None:
        write_event(point, "paused", "train", step=step)
    write_event(point, "done", "train", job_id="1", attempt=1)


def list_running(study: Study) -> list[int]:
    """Return the numbers of the trials that have not reached their rung."""
    return [number for number, trial in enumerate(study.trials) if trial.result is None]


def run_search(run: Run, order: random.Random) -> Study:
    """Run a search in which trials end in a random order. Return the final study."""
    study = update_study(run)
    while not study.is_finished:
        end_trial(run, order.choice(list_running(study)))
        study = update_study(run)
    return study


def load_journal(run: Run) -> Any:
    """Return Optuna's study in the journal of a run."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(run.path / JOURNAL_FILE))
    return optuna.load_study(study_name=run.path.name, storage=optuna.storages.JournalStorage(backend))


def test_the_order_in_which_trials_end_does_not_change_what_optuna_samples(tmp_path: Path) -> None:
    """Searches whose trials end in different orders have the same trials, and Optuna's journal has the same study."""
    run = create_search(tmp_path / "a")
    study = run_search(run, random.Random(1))
    other = create_search(tmp_path / "b")
    assert run_search(other, random.Random(2)) == study
    assert len({trial.parameters["optimizer.lr"] for trial in study.trials}) == 8
    other_seed = create_search(tmp_path / "c", "sweep.seed=1")
    assert run_search(other_seed, random.Random(1)).trials[0].parameters != study.trials[0].parameters
    journals = [
        [
            (trial.params, trial.state.name, trial.value, trial.intermediate_values)
            for trial in load_journal(each).trials
        ]
        for each in (run, other)
    ]
    assert journals[0] == journals[1]
    best = study.find_best()
    assert best is not None and load_journal(run).best_trial.number == best
    assert {state for _, state, *_ in journals[0]} == {"COMPLETE", "PRUNED"}


def test_tpe_prefers_values_near_good_trials(tmp_path: Path) -> None:
    """After 20 trials, most learning rates of TPE are near the best one, 0.02; those of random sampling are not."""
    shares = {}
    for sampler in ("tpe", "random"):
        search = SEARCH[0].replace("trials: 8", f"trials: 40, sampler: {sampler}")
        config = load_config(write_config(tmp_path), [search, *SEARCH[1:]])
        assert config.sweep is not None and config.sweep.search is not None
        trials: list[Trial] = []
        for _ in range(40):
            parameters = sample_parameters(config, config.sweep.search, 0, trials)
            trials.append(Trial(parameters, 0, {0: Result(abs(math.log(parameters["optimizer.lr"] / 0.02)))}))
        rates = [trial.parameters["optimizer.lr"] for trial in trials[20:]]
        shares[sampler] = sum(0.01 < rate < 0.04 for rate in rates) / len(rates)
    assert shares["tpe"] > shares["random"] + 0.2, shares


def test_tpe_avoids_values_whose_trials_failed(tmp_path: Path) -> None:
    """All trials with a learning rate above 0.01 fail. TPE samples such rates less often than before."""
    search = SEARCH[0].replace("trials: 8", "trials: 40").replace("startup_trials: 2", "startup_trials: 10")
    config = load_config(write_config(tmp_path), [search, *SEARCH[1:]])
    assert config.sweep is not None and config.sweep.search is not None
    trials: list[Trial] = []
    for _ in range(40):
        parameters = sample_parameters(config, config.sweep.search, 0, trials)
        rate = parameters["optimizer.lr"]
        trials.append(Trial(parameters, 0, {0: Result(None if rate > 0.01 else 1 / rate)}))
    failures = [trial.has_failed for trial in trials]
    assert 4 <= sum(failures[:10]) <= 6 and sum(failures[10:]) <= 10, failures


def test_a_repeated_decision_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed before or after it has written the record leaves a search that continues as before."""
    run = create_search(tmp_path / "a")
    expected = create_search(tmp_path / "b")
    for _ in range(3):
        study = update_study(run)
        assert update_study(run) == study
        end_trial(run, list_running(study)[0])
        end_trial(expected, list_running(update_study(expected))[0])
        files = {name: (run.path / name).read_bytes() for name in (STUDY_FILE,)}
        with monkeypatch.context() as patch:
            patch.setattr(study_module, "write_journal", lambda *_: sys.exit(1))
            with pytest.raises(SystemExit):
                update_study(run)
        assert (run.path / STUDY_FILE).read_bytes() != files[STUDY_FILE]
        (run.path / STUDY_FILE).write_bytes(files[STUDY_FILE])
    assert update_study(run) == update_study(expected)
    assert len(load_journal(run).trials) == len(read_study(run.path).trials)


def test_optuna_is_not_needed_to_show_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` and `report` show the trials with their states, and the best one."""
    run = create_search(tmp_path / "a")
    study = update_study(run)
    for number in list_running(study):
        end_trial(run, number)
    study = update_study(run)
    [promoted] = [number for number, trial in enumerate(study.trials) if trial.rung == 1]
    monkeypatch.setitem(sys.modules, "optuna", None)
    for print_output in (print_status, print_report):
        console = PlainConsole(width=150, record=True)
        print_output(run, console)
        text = console.export_text()
        rows = {line.split()[0]: line for line in text.splitlines() if line.strip()[:3].isdecimal()}
        assert "promoted" in rows[f"{promoted:03d}"] and "1/3" in rows[f"{promoted:03d}"], text
        paused = next(number for number in range(3) if number != promoted)
        assert "paused" in rows[f"{paused:03d}"] and "2/18" in rows[f"{paused:03d}"], text
        assert f"best trial so far: {promoted:03d}, held_out_loss" in text


@pytest.mark.parametrize(
    ("cause", "failures", "is_result"),
    [("non_finite", 1, True), ("out_of_memory", 1, True), ("crashed", 1, False), ("crashed", 2, True)],
)
def test_a_failure_is_a_result_if_the_parameters_caused_it(
    tmp_path: Path, cause: str, failures: int, is_result: bool
) -> None:
    """A crash is a result only if it repeats after `resume`. A failed trial does not run again."""
    run = create_search(tmp_path / "a")
    update_study(run)
    point = list_points(run)[1]
    for attempt in range(failures):
        write_event(point, "started", "train", job_id="1", attempt=attempt + 1, ranks=1)
        write_event(point, "failed", "train", job_id="1", cause=cause, exit_code=1, message=f"no {cause}", final=True)
        write_event(point, "resumed")
    end_trial(run, 0)
    end_trial(run, 2)
    study = update_study(run)
    assert study.trials[1].has_failed == is_result
    assert (len(study.trials) > 3 or study.trials[0].rung + study.trials[2].rung > 0) == is_result
    console = PlainConsole(width=150, record=True)
    print_status(run, console)
    assert (f"failed: {cause}: no {cause}" in console.export_text()) == is_result
    chain = Chain(run, console, resubmit_failed=True)
    chain.inspect_jobs()
    assert (point.path in {target.path for target in chain.targets["train"]}) != is_result


def test_a_trial_has_its_values_and_pauses_only_below_the_last_rung(tmp_path: Path) -> None:
    run = create_search(tmp_path / "a")
    study = run_search(run, random.Random(1))
    for point, values, trial in zip(list_points(run), list_point_values(run), study.trials, strict=True):
        assert point.config.optimizer.lr == values["optimizer.lr"]
        assert point.config.model.layers == values["model.layers"] in range(1, 5)
        assert point.pause_step == (2, 6, None)[trial.rung] and point.config.train.steps == 18
    assert run.pause_step is None and run.trial is None


def test_values_that_give_an_invalid_config_are_not_sampled(tmp_path: Path) -> None:
    """Half of the combinations of width and number of heads are invalid."""
    search = "sweep={search: {space: {model.dim: [24, 32], model.heads: [4, 8, 6]}, optuna: {trials: 12}}, at_most: 12}"
    run = create_search(tmp_path / "a", search, "model.kv_heads=2")
    trials = update_study(run).trials
    assert len(trials) == 12 and all(
        trial.parameters["model.dim"] % trial.parameters["model.heads"] == 0 for trial in trials
    )
    assert len({tuple(trial.parameters.values()) for trial in trials}) > 2


@pytest.mark.parametrize(
    ("section", "code", "facts"),
    [
        ("search: {space: {}}", "config.out_of_range", ["sweep.search.space"]),
        ("search: {space: {data.sequence_length: [16, 32]}}", "config.conflict", ["data.sequence_length"]),
        ("search: {space: {train.steps: [10, 20]}}", "config.conflict", ["train.steps", "grid"]),
        ("search: {space: {model.init_from: [a, b]}}", "config.conflict", ["model.init_from"]),
        ("search: {space: {optimizer.lrr: [1]}}", "config.unknown_key", ["optimizer.lrr"]),
        ("search: {space: {optimizer.name: [adamw, sgdd]}}", "config.invalid_value", ["optimizer.name", "sgdd"]),
        ("search: {space: {optimizer.lr: {low: 2, high: 1}}}", "config.conflict", ["low (2)", "high (1)"]),
        ("search: {space: {optimizer.lr: {low: 0, high: 1}}}", "config.conflict", ["scale: linear"]),
        ("search: {space: {model.layers: {low: 1.5, high: 3, type: int}}}", "config.conflict", ["low (1.5)", "int"]),
        ("search: {space: {run.seed: [1]}, optuna: {sampler: grid}}", "config.invalid_value", ["tpe", "random"]),
        ("search: {space: {run.seed: [1]}, optuna: {eta: 1}}", "config.out_of_range", ["eta"]),
        ("search: {space: {run.seed: [1]}, optuna: {trials: 5001}}", "config.conflict", ["5,001", "5,000"]),
        ("search: {space: {run.seed: [1]}, optuna: {min_steps: 3}}", "config.conflict", ["evaluate_every (2)"]),
        ("search: {space: {run.seed: [1]}, optuna: {min_steps: 18}}", "config.conflict", ["min_steps (18)"]),
        ("search: {space: {run.seed: [1]}}, grid: {run.seed: [2]}", "config.conflict", ["search", "grid"]),
    ],
)  # fmt: skip
def test_an_invalid_search_is_an_error(tmp_path: Path, section: str, code: str, facts: list[str]) -> None:
    with raises_error(code, *facts, kind=ConfigError):
        check_submission(load_config(write_config(tmp_path), [*SEARCH[1:], f"sweep={{{section}}}"]), on_slurm=False)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["train.evaluate_every="], ["train.evaluate_every", "metric: loss"]),
        (["train.steps=", "train.epochs=1"], ["train.steps"]),
    ],
)
def test_a_search_needs_comparable_values(tmp_path: Path, overrides: list[str], facts: list[str]) -> None:
    with raises_error("config.conflict", "sweep.search", *facts, kind=ConfigError):
        load_config(write_config(tmp_path), [*SEARCH, *overrides])


def test_a_missing_optuna_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_error("search.optuna_missing", "sluice[optuna]"):
        check_submission(load_config(write_config(tmp_path), SEARCH), on_slurm=False)


def test_changed_rungs_and_a_damaged_record_are_errors(tmp_path: Path) -> None:
    run = create_search(tmp_path / "a")
    update_study(run)
    end_trial(run, 0)
    with raises_error("resume.unchangeable_key", "train.steps"):
        run.apply_overrides(["train.steps=36"])
    record = run.path / STUDY_FILE
    record.write_text(record.read_text().replace("6,", "7,"))
    with raises_error("search.changed_rungs", "2, 7, 18", "2, 6, 18"):
        update_study(run)
    record.write_text(record.read_text()[:-20])
    with raises_error("search.damaged_study", record, kind=InputError):
        update_study(run)


def test_a_dry_run_shows_the_rungs(tmp_path: Path) -> None:
    console = PlainConsole(width=150, record=True)
    print_plan(load_config(write_config(tmp_path), SEARCH), "local", console)
    text = console.export_text()
    assert (
        "8 trials by tpe, 3 at once; rungs at steps 2, 6, 18" in text and "model.layers from 1 to 4 (int, log)" in text
    )
