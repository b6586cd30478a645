"""Test that the end of a trial submits the next trials of a search exactly once, on a fake Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.run.directory import Run, list_points
from pipeline.run.trials import read_study
from slurm.submit.chain import cancel_run, reset_for_resume
from slurm.supervise.next_trials import submit_next_trials, was_replaced
from tests.search.test_study import SEARCH, create_search, end_trial
from tests.slurm.submit.test_unconfirmed_submissions import Killed, kill_at_sbatch_call, read_status, slurm, submit
from tests.support.events import read_event_lines, write_event
from tests.support.fake_slurm import FakeSlurm
from tests.support.tiny import make_run

__all__ = ["slurm"]

pytestmark = pytest.mark.usefixtures("slurm")


@pytest.fixture
def run(tmp_path: Path, slurm: FakeSlurm) -> Run:
    """Submit a search of 8 trials, 3 at once, and return its run."""
    run = create_search(tmp_path / "search")
    output = submit(run)
    assert "array over 3 points" in output and "evaluate" not in output, output
    return run


def list_submitted(run: Run) -> list[list[str]]:
    """Return the job ids of the train jobs of each trial."""
    return [[event["job_id"] for event in read_event_lines(point, "train", "submitted")] for point in list_points(run)]


def end_first_trials(run: Run) -> None:
    """End the first three trials at the first rung."""
    for number in range(3):
        end_trial(run, number)


def test_each_trial_is_submitted_once(run: Run, slurm: FakeSlurm) -> None:
    """The supervisors of three trials that end together submit one trial that continues, and two new trials."""
    before = slurm.count_sbatch_calls()
    end_trial(run, 0)
    submit_next_trials(list_points(run)[0])
    assert slurm.count_sbatch_calls() == before, "the decision needs the values of the other two trials"
    for number in (1, 2):
        end_trial(run, number)
    for point in list_points(run)[:3]:
        submit_next_trials(point)
    study = read_study(run.path)
    [promoted] = [number for number, trial in enumerate(study.trials) if trial.rung == 1]
    assert len(study.trials) == 5 and slurm.count_sbatch_calls() == before + 1
    assert [len(job_ids) for job_ids in list_submitted(run)] == [1 + (number == promoted) for number in range(5)]
    assert slurm.list_jobs()[-1]["tasks"] == 3
    assert "promoted, " in read_status(run)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_killed_supervisor_submits_nothing_twice(run: Run, slurm: FakeSlurm, is_accepted: bool) -> None:
    """The supervisor of trial 0 is killed in its call of sbatch. That of trial 1 submits what is missing."""
    end_first_trials(run)
    jobs = len(slurm.list_jobs())
    with kill_at_sbatch_call(1, is_accepted=is_accepted):
        submit_next_trials(list_points(run)[0])
    assert len(slurm.list_jobs()) == jobs + is_accepted
    submit_next_trials(list_points(run)[1])
    submit_next_trials(list_points(run)[2])
    assert len(slurm.list_jobs()) == jobs + 1
    assert all(len(job_ids) == 1 for job_ids in list_submitted(run)[3:])


def test_a_refused_job_is_reported_and_submitted_later(run: Run, slurm: FakeSlurm) -> None:
    """The end of the next trial tries again. `status` shows the reason until then."""
    end_first_trials(run)
    jobs = len(slurm.list_jobs())
    slurm.set_sbatch_outcomes(call_1=["refuse", "Access denied"])
    submit_next_trials(list_points(run)[0])
    assert len(slurm.list_jobs()) == jobs and "Access denied" in read_status(run)
    submit_next_trials(list_points(run)[1])
    assert len(slurm.list_jobs()) == jobs + 1


def test_a_cancelled_search_submits_nothing(run: Run, slurm: FakeSlurm) -> None:
    end_first_trials(run)
    jobs = len(slurm.list_jobs())
    cancel_run(run)
    submit_next_trials(list_points(run)[0])
    assert len(slurm.list_jobs()) == jobs and len(read_study(run.path).trials) == 3


def test_a_trial_that_runs_without_a_job_submits_nothing(run: Run, slurm: FakeSlurm) -> None:
    """In a job of chain.sbatch, `submit.py` runs the trials one after the other, and decides itself."""
    end_first_trials(run)
    write_event(list_points(run)[0], "submitted", "train", job_id="123", executor="local")
    jobs = len(slurm.list_jobs())
    submit_next_trials(list_points(run)[0])
    assert len(slurm.list_jobs()) == jobs
    submit_next_trials(list_points(run)[1])
    assert len(slurm.list_jobs()) == jobs + 1


def test_resume_continues_a_cancelled_search(tmp_path: Path, slurm: FakeSlurm) -> None:
    """The search was cancelled after the end of two trials. `resume` submits the third one, and later trials follow."""
    run = make_run(tmp_path, overrides=SEARCH)  # the prepare and shard stages are done
    submit(run)
    for number in (0, 1):
        end_trial(run, number)
    cancel_run(run)
    assert not [job for job in slurm.list_jobs() if job["state"] == "PENDING"]
    reset_for_resume(run, replaces_jobs=False)
    assert "train     job" in submit(run)
    assert [name for name, _ in slurm.list_queue()].count("train") == 1
    assert [len(job_ids) for job_ids in list_submitted(run)] == [1, 1, 2]
    end_trial(run, 2)
    submit_next_trials(list_points(run)[2])
    assert [name for name, _ in slurm.list_queue()].count("train") == 2 and len(read_study(run.path).trials) == 5


def test_a_trial_at_the_last_rung_is_also_evaluated(run: Run, slurm: FakeSlurm) -> None:
    """Each evaluate job waits for the train job of its trial."""
    while not (study := read_study(run.path)).is_finished:
        number = next(number for number, trial in enumerate(study.trials) if trial.result is None)
        point = list_points(run)[number]
        end_trial(run, number)
        submit_next_trials(point)
    jobs = {job["id"]: job for job in slurm.list_jobs()}
    evaluations = [job for job in jobs.values() if job["name"].startswith("evaluate")]
    assert len(evaluations) == sum(trial.rung == 2 for trial in study.trials)
    for job in evaluations:
        awaited = job["dependency"].removeprefix("afterok:")
        assert jobs[awaited.partition("_")[0]]["name"].startswith("train")


def test_a_requeued_job_does_not_train_for_its_replacement(run: Run) -> None:
    """Slurm may requeue the job of a trial that has paused, although a later job continues the trial."""
    point = list_points(run)[0]
    [[old_job], *_] = list_submitted(run)
    assert not was_replaced(point, old_job)
    write_event(point, "submitted", "train", job_id="77", after=[old_job], kind="afternotok")
    assert not was_replaced(point, old_job), "a successor job is no replacement"
    write_event(point, "submitted", "train", job_id="99")
    assert was_replaced(point, old_job) and not was_replaced(point, "99")


def test_killed_is_not_caught() -> None:
    """`submit_next_trials` catches every Exception, so the exception of `kill_at_sbatch_call` must be none."""
    assert not issubclass(Killed, Exception)
