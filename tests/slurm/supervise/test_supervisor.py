"""Tests of the supervisor with simulated ranks and a simulated clock: stops, locks, requeues and successor jobs."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.base.dist_env import TIME_LEFT_VARIABLE
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import add_checksum, write_json
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import MANIFEST_FILE, checkpoint_name
from pipeline.config.read import load_config
from pipeline.run.attempts import StageState
from pipeline.run.directory import Run
from pipeline.run.events import Event, Stopping
from pipeline.run.failure import write_error_report
from pipeline.run.stages import Progress
from slurm.query import slurm_commands
from slurm.query.current_job import JobInfo
from slurm.query.job_states import JobState
from slurm.supervise import background, succession, supervisor
from slurm.supervise.decision import JobFacts, StopFacts, determine_cause
from slurm.supervise.launch import RankExit
from slurm.supervise.supervisor import Supervisor
from tests.support.events import read_event_lines, write_event
from tests.support.ranks import make_rank_info
from tests.support.tiny import write_config

SIGTERM = 15


class SimulatedRanks:
    """A replacement for a rank launcher. It has one rank, which starts no process.

    The rank exits with `code` at poll number `polls`. Each poll calls `on_poll` with its number, from 1.
    """

    code: int = ExitCode.STOPPED
    polls = 3
    on_poll: Callable[[int], None] = staticmethod(lambda poll: None)

    def __init__(self, run: Run, stage: str, size: int, lock: int) -> None:
        self.rank_count = size
        self.is_running = True
        self.rank_processes: dict[int, tuple[str, int]] = {}
        self._poll_count = 0

    def start(self) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def poll(self) -> list[RankExit]:
        self._poll_count += 1
        self.on_poll(self._poll_count)
        self.is_running = self._poll_count < self.polls
        return [] if self.is_running else [RankExit(0, self.code)]


class SimulatedClock:
    """Replace the clock of the supervisor. A sleep returns at once, advances the clock and calls `on_sleep(time)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_sleep: Callable[[float], None] = lambda now: None) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        self.on_sleep = on_sleep
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)
        self.on_sleep(self.now)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a new run of a tiny config."""
    return Run.create(load_config(write_config(tmp_path)))


def make_supervisor(
    run: Run, monkeypatch: pytest.MonkeyPatch, flag: StopFlag | None = None, **rank_attributes: Any
) -> Supervisor:
    """Return a supervisor of the train stage with simulated ranks.

    Args:
        run: the run.
        monkeypatch: replaces the launcher of the ranks.
        flag: the stop flag of the supervisor; None for a new one.
        rank_attributes: attributes and methods that replace those of :class:`SimulatedRanks`.
    """
    attributes = {name: staticmethod(value) if callable(value) else value for name, value in rank_attributes.items()}
    ranks = type("Ranks", (SimulatedRanks,), attributes)
    monkeypatch.setattr(
        supervisor, "create_launcher", lambda run, stage, size, lock, **options: ranks(run, stage, size, lock)
    )
    monkeypatch.setattr(supervisor, "REQUEST_POLL_S", 0.0)
    return Supervisor(run, "train", flag or StopFlag())


def enter_batch_job(
    job_supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, job_id: str, restarts: int = 0
) -> list[Any]:
    """Make the supervisor believe that it runs in a batch job of a cluster whose controller does not respond.

    Args:
        job_supervisor: the supervisor.
        monkeypatch: replaces the functions that query Slurm, and those that this list records.
        job_id: ID of the job.
        restarts: how often the job was requeued.

    Returns:
        An empty list, to which the supervisor later appends its actions. The action "cancelled waiting jobs" stands
        for the cancellation of jobs that depend on this one. A tuple (cause, has_progress) stands for an exit after
        which the stage is retried.
    """
    actions: list[Any] = []
    job_supervisor.on_slurm = True
    job_supervisor.is_batch = True
    job_supervisor.nodes = ["n1"]
    job_supervisor.submitted_job_id = job_id
    job_supervisor.rank_info = replace(make_rank_info(0, 1, 1), job_id=job_id, restart_count=restarts)
    monkeypatch.setattr(supervisor, "apply_site_environment", lambda *arguments: None)
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda *arguments: None)
    monkeypatch.setattr(supervisor.capacity, "find_placement_problem", lambda *arguments: None)
    monkeypatch.setattr(supervisor.succession, "take_over", lambda *arguments: None)
    monkeypatch.setattr(
        supervisor.succession,
        "cancel_unneeded_jobs",
        lambda *arguments, is_done: actions.append("cancelled waiting jobs"),
    )

    def record_exit(self: Supervisor, attempt_end: supervisor.AttemptEnd, facts: StopFacts) -> ExitCode:
        actions.append((attempt_end.cause.name, facts.has_progress))
        return attempt_end.cause

    monkeypatch.setattr(Supervisor, "_exit_for_retry", record_exit)
    return actions


def write_start(run: Run, job_id: str) -> None:
    """Write the event `started` of the first attempt of the train stage, in a Slurm job."""
    write_event(run, "started", "train", attempt=1, slurm_job=job_id, job_id=job_id, restarts=0, standing="step 0")


def exit_after_crash(job_supervisor: Supervisor) -> ExitCode:
    """Make the supervisor of a batch job exit after a crash that allows a retry of the stage. Return the exit code."""
    facts = StopFacts(
        cause=ExitCode.CRASHED,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=job_supervisor.run.config.recovery,
        is_batch=True,
        was_signalled=False,
        job=JobFacts(job_supervisor.run.config.site),
    )
    return job_supervisor._exit_for_retry(supervisor.AttemptEnd(ExitCode.CRASHED), facts)


# ---- requests to stop, and the reports of ranks


def test_stage_that_is_done_does_not_start_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, a user submits the template train.sbatch for a finished run."""
    job_supervisor = make_supervisor(run, monkeypatch, code=ExitCode.CRASHED)
    monkeypatch.setattr(
        job_supervisor,
        "stage_module",
        SimpleNamespace(describe_missing_outputs=lambda run: None, progress=lambda run: Progress("30/30")),
    )
    assert job_supervisor.supervise() == ExitCode.DONE
    assert "30/30" in capsys.readouterr().out and not read_event_lines(run, "train")


@pytest.mark.parametrize("poll", [1, 2, 3])
@pytest.mark.parametrize(("code", "cause"), [(ExitCode.STOPPED, "stop file"), (ExitCode.CRASHED, "crashed")])
def test_stop_file_takes_precedence_over_an_earlier_signal(
    run: Run, monkeypatch: pytest.MonkeyPatch, poll: int, code: ExitCode, cause: str
) -> None:
    """The supervisor has received SIGTERM, then a user creates the stop file. The stage must not be retried.

    `poll` is the poll of the ranks during which the file is created: while they save, or (3) when they exit.
    """
    flag = StopFlag()
    flag._set(SIGTERM)
    job_supervisor = make_supervisor(
        run, monkeypatch, flag, code=code, on_poll=lambda number: run.stop_file.touch() if number == poll else None
    )
    job_supervisor.is_batch = True
    monkeypatch.setattr(
        Supervisor, "_exit_for_retry", lambda *arguments: pytest.fail("retried a stage that a user stopped")
    )
    assert job_supervisor.supervise() == code
    assert read_event_lines(run, "train")[-1]["cause"] == cause and not run.stop_file.exists()


def test_cause_of_a_stop_is_not_taken_from_an_earlier_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_event(run, "started", "train", attempt=1)
    write_event(run, "stop_requested", "train", signal="SIGUSR2")
    job_supervisor = make_supervisor(run, monkeypatch)
    assert job_supervisor.supervise() == ExitCode.STOPPED
    assert read_event_lines(run, "train")[-1]["cause"] == "signal", "the ranks of this attempt recorded no cause"
    job_supervisor = make_supervisor(
        run, monkeypatch, on_poll=lambda number: write_event(run, "stop_requested", "train", signal="SIGINT")
    )
    job_supervisor.supervise()
    assert read_event_lines(run, "train")[-1]["cause"] == "SIGINT"


@pytest.mark.parametrize(
    ("recorded_cause", "reason", "ranks_earlier_s", "is_preempted"),
    [
        (None, "SIGTERM", 0.0, False),
        (None, "SIGTERM", 15.0, True),  # The ranks received a signal at the start of the grace period.
        (None, "SIGUSR2", None, True),  # This signal comes from the sbatch option --signal=B:USR2@…
        ("preempted", "SIGTERM", None, True),
        ("time_limit", "SIGUSR2", 15.0, False),
        ("requeued", "SIGTERM", None, False),
        (None, None, None, False),
    ],
)
def test_preemption_is_recognized_after_slurm_has_requeued_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch, recorded_cause: str | None, reason: str | None,
    ranks_earlier_s: float | None, is_preempted: bool,
) -> None:  # fmt: skip
    """The controller only shows that the job was requeued. The signals and events of the attempt show the reason.

    - `recorded_cause`: cause in the event `stopping`; None: there is no such event.
    - `reason`: the signal that the supervisor received; None: it received no signal.
    - `ranks_earlier_s`: seconds by which the ranks received a signal before the supervisor; None: they received none.
    """
    job_supervisor = make_supervisor(run, monkeypatch)
    write_event(run, "started", "train", attempt=1, task=None)
    if ranks_earlier_s is not None:
        write_event(run, "stop_requested", "train", step=7, signal="SIGUSR2")
    job_supervisor.stop_flag.reason = reason
    job_supervisor.stop_flag.signal_time = time.monotonic() + (ranks_earlier_s or 0.0)
    now = time.time() + (ranks_earlier_s or 0.0)
    monkeypatch.setattr(supervisor.time, "time", lambda: now)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: job_supervisor.stop_flag.signal_time)
    if recorded_cause:
        write_event(run, "stopping", "train", by=reason, cause=recorded_cause)
    job_supervisor.rank_info = replace(make_rank_info(0, 1, 1), job_id="12")
    requeued_job = JobInfo("COMPLETING", restarts=1, is_preempted=False, time_left_s=100.0, is_batch=True)
    cause, _ = determine_cause(ExitCode.STOPPED, job_supervisor._gather_job_facts(requeued_job, ExitCode.STOPPED))
    assert cause == (ExitCode.PREEMPTED if is_preempted else ExitCode.REQUEUED)


def test_each_attempt_receives_the_remaining_time_of_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is an allocation, not a batch job. The event `started` also names the job and its cluster."""
    info = JobInfo("RUNNING", restarts=0, is_preempted=False, time_left_s=100.0, is_batch=False, submit_time=7.0)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "cluster-a")
    monkeypatch.setenv(TIME_LEFT_VARIABLE, "")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda job: info)
    job_supervisor = make_supervisor(run, monkeypatch, code=ExitCode.DONE)
    job_supervisor.on_slurm = False  # an attempt would otherwise check the nodes of the job
    time_left_s = []
    for elapsed_s in (0.0, 30.0, 100.0):  # since the previous attempt; the last attempt starts after the time limit
        if job_supervisor.job_deadline is not None:
            job_supervisor.job_deadline -= elapsed_s  # instead of waiting
        job_supervisor._run_attempt(lock_fd=0, progress_marker="")
        time_left_s.append(float(os.environ[TIME_LEFT_VARIABLE]))
    assert [round(seconds, -1) for seconds in time_left_s] == [100.0, 70.0, 0.0] and time_left_s[2] == 0.0
    started = read_event_lines(run, "train", "started")[-1]
    assert [started[key] for key in ("cluster", "job_name", "job_submitted")] == ["cluster-a", "interactive", 7.0]


def test_end_event_of_a_hang_names_the_rank_that_is_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks write a report of the hang. Rank 0 exits first, but rank 1 is in an earlier phase."""

    def write_reports(poll: int) -> None:
        for rank, phase_number in ((0, 3), (1, 1)):
            report = {"rank": rank, "host": f"n{rank}", "step": 5, "number": phase_number, "phase": "reduce"}
            write_json(run.stage_dir("train") / f"hang-rank-{rank}.json", {**report, "stacks": "", "collectives": []})
        write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.HANG, "rank 0 was in phase 'reduce'")

    job_supervisor = make_supervisor(run, monkeypatch, code=ExitCode.HANG, on_poll=write_reports)
    assert job_supervisor.supervise() == ExitCode.HANG
    event = read_event_lines(run, "train")[-1]
    assert (event["event"], event["cause"], event["rank"], event["host"]) == ("failed", "hang", 1, "n1")
    assert event["final"] and "'reduce'" in event["message"] and "nothing new" in event["message"]


@pytest.mark.parametrize("error_number", [errno.ESHUTDOWN, errno.EIO, errno.ESTALE])
def test_temporary_failure_of_the_file_system_does_not_stop_the_ranks(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error_number: int
) -> None:
    """For example, the Lustre server evicts the client of the node of the supervisor. Other nodes are not affected.

    Here, all calls of stat() for the stop file and the cancellation file fail until poll 30.
    """
    stat = Path.stat
    is_failing = [True]

    def fail_for_requests(self: Path, **options: Any) -> os.stat_result:
        if is_failing[0] and self in (run.stop_file, run.cancelled_file):
            raise OSError(error_number, os.strerror(error_number), str(self))
        return stat(self, **options)

    def recover_at_poll_30(poll: int) -> None:
        is_failing[0] = is_failing[0] and poll < 30

    job_supervisor = make_supervisor(run, monkeypatch, polls=30, code=ExitCode.DONE, on_poll=recover_at_poll_30)
    monkeypatch.setattr(
        job_supervisor,
        "stage_module",
        SimpleNamespace(describe_missing_outputs=lambda run: "no output" if is_failing[0] else None),
    )
    monkeypatch.setattr(Path, "stat", fail_for_requests)
    monkeypatch.setattr(Run, "check_not_cancelled", lambda self: None)
    assert job_supervisor.supervise() == ExitCode.DONE
    assert capsys.readouterr().err.count(os.strerror(error_number)) == 1, "the error must be printed exactly once"


def test_ranks_are_stopped_even_if_the_event_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event `stopping` cannot be appended to events.jsonl."""
    job_supervisor = make_supervisor(run, monkeypatch)
    append_event = Run.append_event

    def fail_for_stopping(self: Run, event: Event) -> None:
        if isinstance(event, Stopping):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        append_event(self, event)

    monkeypatch.setattr(Run, "append_event", fail_for_stopping)
    job_supervisor.stop_flag._set(SIGTERM)
    assert job_supervisor.supervise() == ExitCode.STOPPED


@pytest.mark.parametrize(("seconds", "code"), [(2300.0, ExitCode.STOPPED), (2600.0, ExitCode.HANG)])
def test_ranks_are_killed_if_they_do_not_stop_within_save_s_and_600_seconds(
    run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, code: ExitCode
) -> None:
    """The default of `recovery.save_s` is 1800 s, so the supervisor waits for 2400 s.

    The ranks exit `seconds` after the signal. Normally, the ranks detect a hang themselves before that.
    """
    clock = SimulatedClock(monkeypatch)
    job_supervisor = make_supervisor(run, monkeypatch, polls=20, on_poll=lambda poll: clock.sleep(seconds / 20))
    job_supervisor.stop_flag._set(SIGTERM)
    assert job_supervisor.supervise() == code
    assert code == ExitCode.STOPPED or "2400 s" in read_event_lines(run, "train")[-1]["message"]


# ---- the lock of the stage


@pytest.mark.parametrize("kind", ["requeued", "successor"])
def test_attempt_ends_as_node_failure_if_the_previous_one_does_not_release_the_lock(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """For example, a rank of the previous attempt hangs in the kernel.

    The wait ends after LOCK_WAIT_S (900 s). The stage is retried, and no waiting job is cancelled.
    """
    previous_job = "5"
    job = "5" if kind == "requeued" else "6"
    write_start(run, previous_job)
    if kind == "successor":
        write_event(run, "submitted", "train", job_id=job, executor="slurm", after=[previous_job], kind="afternotok")
    assert run.lock_stage("train") is not None
    job_supervisor = make_supervisor(
        run,
        monkeypatch,
        start=lambda *arguments: pytest.fail("ranks started although the lock was held"),
    )
    actions = enter_batch_job(job_supervisor, monkeypatch, job, restarts=int(kind == "requeued"))
    clock = SimulatedClock(monkeypatch)
    assert job_supervisor.supervise() == ExitCode.NODE_FAILURE
    assert actions == [("NODE_FAILURE", False)]
    assert 900 <= clock.now < 910 and min(clock.sleeps) >= 1.0, (
        "each try to lock the file sends a request to the file server, so the pause must be at least 1 s"
    )
    event = read_event_lines(run, "train")[-1]
    assert (event["event"], event["cause"], event["attempt"]) == ("failed", "node_failure", 2)
    assert f"pid {os.getpid()}" in event["message"] and not event.get("final")


def test_attempt_starts_when_the_previous_one_releases_the_lock_late(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is released after 600 s. Then the ranks start and run out of memory."""
    write_start(run, "5")
    lock = run.lock_stage("train") or 0
    job_supervisor = make_supervisor(run, monkeypatch, code=ExitCode.OUT_OF_MEMORY)
    actions = enter_batch_job(job_supervisor, monkeypatch, "5", restarts=1)
    clock = SimulatedClock(monkeypatch, lambda now: os.close(lock) if now == 600 else None)
    assert job_supervisor.supervise() == ExitCode.OUT_OF_MEMORY, "the ranks must have been started"
    assert 600 <= clock.now < 605
    assert actions == ["cancelled waiting jobs"], (
        "the stage must not be retried after this cause without a new checkpoint"
    )


def test_signal_or_stop_file_ends_the_wait_for_the_lock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, the stage is retried. After a stop file, it is not, and the waiting jobs are cancelled."""
    write_start(run, "5")
    assert run.lock_stage("train") is not None
    job_supervisor = make_supervisor(run, monkeypatch)
    actions = enter_batch_job(job_supervisor, monkeypatch, "5", restarts=1)
    clock = SimulatedClock(monkeypatch, lambda now: job_supervisor.stop_flag._set(SIGTERM))
    assert job_supervisor.supervise() == ExitCode.STOPPED and clock.now < 5 and actions == [("STOPPED", False)]
    job_supervisor = make_supervisor(run, monkeypatch)
    actions = enter_batch_job(job_supervisor, monkeypatch, "5", restarts=2)
    clock = SimulatedClock(monkeypatch, lambda now: run.stop_file.touch())
    assert job_supervisor.supervise() == ExitCode.STOPPED and clock.now < 5 and actions == ["cancelled waiting jobs"]
    assert read_event_lines(run, "train")[-1]["cause"] == "stop file" and not run.stop_file.exists()


@pytest.mark.parametrize("restarts", [0, 1])
def test_stage_does_not_start_if_another_job_runs_it(run: Run, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    """Job 9 runs the stage. Job 5 is not its successor, so it waits only 60 s for the lock."""
    write_start(run, "9")
    assert run.lock_stage("train") is not None
    job_supervisor = make_supervisor(run, monkeypatch)
    enter_batch_job(job_supervisor, monkeypatch, "5", restarts)
    clock = SimulatedClock(monkeypatch)
    with pytest.raises(UserError) as raised:
        job_supervisor.supervise()
    assert raised.value.code == "run.stage_running"
    assert 60 <= clock.now < 70 and len(read_event_lines(run, "train")) == 1


# ---- requeueing


RUNNING_JOB = JobInfo("RUNNING", restarts=0, is_preempted=False, time_left_s=None, is_batch=True)


@pytest.mark.parametrize(
    ("time_left_s", "recovery_time", "event_name", "message"),
    [
        # No time limit: the queries continue for JOB_INFO_WAIT_S, an hour.
        (None, 3000.0, "requeued", ""), (None, math.inf, "failed", "for 36"),
        # A time limit that ends earlier: also an hour, because without a controller nothing enforces the limit.
        (600.0, 3000.0, "requeued", ""),
        # A time limit that ends later: the queries continue until JOB_INFO_RESERVE_S (300 s) before it.
        (36000.0, 30000.0, "requeued", ""), (36000.0, math.inf, "failed", "for 357"),
    ],
)  # fmt: skip
def test_controller_that_does_not_respond_is_queried_for_an_hour_or_until_the_time_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch, time_left_s: float | None, recovery_time: float, event_name: str,
    message: str,
) -> None:  # fmt: skip
    """The controller responds again after `recovery_time` seconds. Then the job is requeued, otherwise the stage fails.

    `message` is the beginning of the seconds in the message of the event.
    """
    clock = SimulatedClock(monkeypatch)
    query_times: list[float] = []

    def read_job_info(*arguments: object) -> JobInfo | None:
        query_times.append(clock.now)
        return RUNNING_JOB if clock.now >= recovery_time else None

    job_supervisor = make_supervisor(run, monkeypatch)
    job_supervisor.rank_info = replace(make_rank_info(0, 1, 1), job_id="5")
    job_supervisor.job_deadline = time_left_s
    monkeypatch.setattr(supervisor.current_job, "read_job_info", read_job_info)
    monkeypatch.setattr(supervisor.current_job, "requeue_job", lambda *arguments: clock.now >= recovery_time)
    monkeypatch.setattr(supervisor.current_job, "excluded_nodes_at_requeue", lambda *arguments: None)
    monkeypatch.setattr("slurm.query.preemption.is_requeued_on_exit", lambda *arguments: False)
    assert exit_after_crash(job_supervisor) == ExitCode.CRASHED
    event = read_event_lines(run, "train")[-1]
    assert event["event"] == event_name and message in event.get("message", "")
    assert "site.requeue" not in event.get("message", "") and len(query_times) < 20 + clock.now / 60


def test_signal_ends_the_pause_between_two_queries(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor must query the controller soon after the signal, not only after its pause of up to 60 s.

    A controller that responds again ends jobs that exceeded their time limit. It sends SIGTERM, and SIGKILL 30 s later.
    """
    job_supervisor = make_supervisor(run, monkeypatch)

    def signal_at_1000(now: float) -> None:
        if now >= 1000 and not job_supervisor.stop_flag.signal_count:
            job_supervisor.stop_flag._handle(SIGTERM, None)

    clock = SimulatedClock(monkeypatch, signal_at_1000)
    monkeypatch.setattr(
        supervisor.current_job, "read_job_info", lambda job_id: RUNNING_JOB if clock.now >= 1000 else None
    )
    info, _ = job_supervisor._wait_for_job_info(0)
    assert info == RUNNING_JOB and clock.now < 1001


def test_requeue_is_repeated_if_the_controller_stopped_responding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not respond from the first requeue request until time 1000."""
    job_supervisor = make_supervisor(run, monkeypatch)
    job_supervisor.rank_info = replace(make_rank_info(0, 1, 1), job_id="5")
    clock = SimulatedClock(monkeypatch)
    requeue_times: list[float] = []

    def requeue(*arguments: object) -> bool:
        requeue_times.append(clock.now)
        return clock.now >= 1000

    def read_job_info(job_id: str) -> JobInfo | None:
        return None if requeue_times and clock.now < 1000 else RUNNING_JOB

    monkeypatch.setattr(supervisor.current_job, "read_job_info", read_job_info)
    monkeypatch.setattr(supervisor.current_job, "requeue_job", requeue)
    monkeypatch.setattr(supervisor.current_job, "excluded_nodes_at_requeue", lambda *arguments: None)
    monkeypatch.setattr("slurm.query.preemption.is_requeued_on_exit", lambda *arguments: False)
    assert exit_after_crash(job_supervisor) == ExitCode.CRASHED
    assert read_event_lines(run, "train")[-1]["event"] == "requeued" and len(requeue_times) == 2
    monkeypatch.setattr(supervisor.current_job, "requeue_job", lambda *arguments: False)
    exit_after_crash(job_supervisor)
    assert "site.requeue: false" in read_event_lines(run, "train")[-1]["message"], (
        "the message must say that the controller refused the requeue, because the controller responded"
    )


# ---- successor jobs and waiting jobs


@pytest.mark.parametrize(
    ("job_id", "is_done", "cancelled_ids"),
    [
        ("11", False, "16 20 15 14 13 12"),  # prepare fails: all later jobs of the chain, the newest job first
        ("13", False, "16 20 15 14"),  # the last job of shard fails: train, its successors, and evaluate
        # train fails: its successor and evaluate; train is done: only its successor
        ("14", False, "20 15"), ("15", False, "16 20"), ("14", True, "15"), ("15", True, "16"), ("13", True, ""),
        # the evaluation of one checkpoint: the evaluation of the next checkpoint (31) does not need it
        ("30", False, ""), ("30", True, ""),
    ],
)  # fmt: skip
def test_waiting_jobs_are_cancelled_if_they_can_no_longer_start(
    run: Run, monkeypatch: pytest.MonkeyPatch, job_id: str, is_done: bool, cancelled_ids: str
) -> None:
    """Job `job_id` ends. 15 is the successor of train job 14, and 16 that of 15. 15 has taken over from 14."""

    def submit(stage: str, job_id: str, dependency_type: str, *after: str, **fields: object) -> None:
        fields |= {"job_id": job_id, "kind": dependency_type, "after": after}
        write_event(run, "submitted", stage, executor="slurm", **fields)

    submit("prepare", "11", "afterok")
    submit("shard", "12", "afterok", "11")
    submit("shard", "13", "afterany", "12")
    submit("train", "14", "afterok", "13")
    submit("train", "15", "afternotok", "14")
    submit("evaluate", "20", "afterok", "14")
    submit("evaluate", "30", "afterok", step=7)
    submit("evaluate", "31", "afterany", "30", step=14)
    if job_id != "14":  # 15 starts and submits 16 only after 14 has ended
        submit("train", "16", "afternotok", "15")
        write_event(run, "took_over", "train", job_id="15", predecessor="14", children=["20"])
    commands: list[str] = []
    pending_ids = {"11", "12", "13", "14", "15", "16", "20", "31"} - {job_id}
    states = {each: JobState(each, "PENDING" if each in pending_ids else "RUNNING") for each in map(str, range(10, 40))}
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: states[job.job_id] for job in jobs}
    )
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command: commands.append(" ".join(command)))
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: None)
    stage = {"11": "prepare", "13": "shard", "30": "evaluate"}.get(job_id, "train")
    succession.cancel_unneeded_jobs(run, stage, replace(make_rank_info(0, 1, 1), job_id=job_id), is_done=is_done)
    assert commands == ([f"scancel {cancelled_ids}"] if cancelled_ids else [])


def test_jobs_that_waited_for_the_predecessor_wait_for_the_successor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare job 15 is the successor of 11. Only job 12 waits for 11 itself; the later jobs wait for other jobs."""
    from slurm.submit import sbatch

    for stage, job_id, dependency_type, after in (
        ("prepare", "11", "afterok", []), ("shard", "12", "afterok", ["11"]), ("shard", "13", "afterany", ["12"]),
        ("train", "14", "afterok", ["13"]), ("prepare", "15", "afternotok", ["11"]),
    ):  # fmt: skip
        write_event(run, "submitted", stage, job_id=job_id, executor="slurm", kind=dependency_type, after=after)
    commands: list[str] = []
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: JobState(job.job_id, "PENDING") for job in jobs}
    )
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command: commands.append(" ".join(command)))
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: None)
    monkeypatch.setattr(sbatch, "submit_stage", lambda *arguments, **options: "16")
    assert succession.take_over(run, "prepare", replace(make_rank_info(0, 1, 1), job_id="15")) is None
    assert commands == ["scontrol update JobId=12 Dependency=afterok:15"]


def test_successor_starts_without_a_further_successor_and_submits_it_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If sbatch refuses the successor of job 15, job 15 still runs the stage. It submits the successor when it ends."""
    write_event(run, "submitted", "train", job_id="15", executor="slurm", kind="afternotok", after=["14"])
    refusals = [UserError("slurm.job_refused", "sbatch refused the job: too many jobs")]
    submitted: list[Any] = []

    def submit(run: Run, stage: str, after: list[str], *, dependency_type: str, **options: Any) -> None:
        if refusals:
            raise refusals.pop()
        submitted.append((stage, after, dependency_type))

    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", submit)
    monkeypatch.setattr(succession.job_states, "query_job_states", lambda jobs: {})
    monkeypatch.setattr(succession, "_was_cancelled", lambda *arguments: False)
    assert succession.take_over(run, "train", replace(make_rank_info(0, 1, 1), job_id="15")) is None, (
        "the stage must start"
    )
    assert "too many jobs" in capsys.readouterr().err and read_event_lines(run, "train")[-1]["event"] == "took_over"
    assert succession.hand_over(run, "train", "15") is None and submitted == [("train", ["15"], "afternotok")]


@pytest.mark.parametrize(
    ("script", "expected_text"), [("exit 1", "exit code 1"), ("echo accepted, perhaps", "accepted, perhaps")]
)
def test_error_of_an_unclear_submission_contains_the_output_or_exit_code_of_sbatch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected_text: str
) -> None:
    """It is unknown whether the job exists if sbatch fails without a message, or prints no job ID."""
    from slurm.submit.sbatch import submit_stage

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    with pytest.raises(UserError) as raised:
        submit_stage(run, "train", [], dependency_type="afternotok", timeout_s=0.5)
    assert raised.value.code == "slurm.submission_unknown" and expected_text in str(raised.value)


# ---- evaluations of new checkpoints


def test_failed_submission_of_an_evaluation_is_repeated_and_does_not_stop_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each failure, the pause doubles. An error that is equal to the previous one writes no second event."""
    submitter = background.EvaluationSubmitter(run)
    clock = SimulatedClock(monkeypatch)
    submit_times: list[float] = []
    errors: list[Exception] = [
        UserError("slurm.job_refused", "sbatch refused"), FileNotFoundError(2, "no sbatch"), RuntimeError("a bug"),
        OSError(116, "stale"), OSError(116, "stale"),
    ]  # fmt: skip

    def submit(*arguments: Any, **options: Any) -> None:
        submit_times.append(clock.now)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(background, "time", supervisor.time)
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [2])
    monkeypatch.setattr(background, "count_training_steps", lambda *arguments: 9)
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", submit)
    submitter.is_enabled = True
    while clock.now < 7200:
        submitter.poll()
        clock.sleep(1.0)
    assert submit_times == [0, 60, 180, 420, 900, 1860], "the pause must double until a submission succeeds"
    messages = [event["message"] for event in read_event_lines(run, "evaluate", "evaluation_not_submitted")]
    beginnings = [message.split(":")[0] for message in messages]
    assert beginnings == ["sbatch refused", "FileNotFoundError", "RuntimeError", "OSError"]


@pytest.mark.parametrize(("early_stop", "submitted_steps"), [({"steps": 40}, []), ({"steps": 30}, [7]), (None, [7])])
def test_no_extra_evaluation_is_submitted_for_the_final_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, early_stop: dict[str, int] | None, submitted_steps: list[int]
) -> None:
    """The evaluate job of the chain evaluates the final checkpoint.

    A callback may complete a run early, here at step 7 of 40. The checkpoint then records in `early_stop` for how many
    steps the run was configured. If the config now has another number of steps, the record does not count.
    """
    manifest = {"step": 7, "samples_consumed": 28, "layout": {}, "files": {}, "extra": {"early_stop": early_stop}}
    checkpoint = run.checkpoints_dir / checkpoint_name(7)
    checkpoint.mkdir()
    write_json(checkpoint / MANIFEST_FILE, add_checksum(manifest))
    steps: list[int] = []
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda *arguments, **options: steps.append(options["step"]))
    monkeypatch.setattr(background, "count_training_steps", lambda *arguments: 40)
    submitter = background.EvaluationSubmitter(run)
    submitter.is_enabled = True
    submitter.poll()
    assert steps == submitted_steps and not read_event_lines(run, "evaluate", "evaluation_not_submitted")
