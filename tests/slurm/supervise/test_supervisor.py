"""The supervisor's own decisions, with ranks that only pretend."""

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
from slurm.query.current_job import JobInfo
from slurm.query.job_states import JobState
from slurm.supervise import background, succession, supervisor
from slurm.supervise.decision import JobFacts, StopFacts, determine_cause
from slurm.supervise.launch import RankExit
from slurm.supervise.supervisor import Supervisor
from tests.support.events import read_event_lines, write_event
from tests.support.ranks import make_rank_info
from tests.support.tiny import write_config


class Pretended:
    """Ranks that leave with `code` after some looks; `act` is called with each look's number before."""

    code: int = ExitCode.STOPPED
    looks = 3
    act: Callable[[int], None] = staticmethod(lambda look: None)

    def __init__(self, run: Run, stage: str, size: int, lock: int) -> None:
        self.size, self.is_running, self._looks = size, True, 0

    def start(self) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def poll(self) -> list[RankExit]:
        self._looks += 1
        self.act(self._looks)
        self.is_running = self._looks < self.looks
        return [] if self.is_running else [RankExit(0, self.code)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(load_config(write_config(tmp_path)))


def supervised(run: Run, monkeypatch: pytest.MonkeyPatch, flag: StopFlag | None = None, **pretend: Any) -> Supervisor:
    """A supervisor of `train` with such ranks."""
    ranks = type("Ranks", (Pretended,), {k: staticmethod(v) if callable(v) else v for k, v in pretend.items()})
    monkeypatch.setattr(
        supervisor, "create_launcher", lambda run, stage, size, lock, **more: ranks(run, stage, size, lock)
    )
    monkeypatch.setattr(supervisor, "REQUEST_POLL_S", 0.0)
    return Supervisor(run, "train", flag or StopFlag())


def test_a_stage_that_is_done_is_not_started_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when train.sbatch is given a finished run."""
    one = supervised(run, monkeypatch, code=ExitCode.CRASHED)
    monkeypatch.setattr(
        one, "stage_module", SimpleNamespace(missing_outputs=lambda run: None, progress=lambda run: Progress("30/30"))
    )
    assert one.supervise() == ExitCode.DONE
    assert "train is not tried again (done): 30/30" in capsys.readouterr().out and not read_event_lines(run, "train")


@pytest.mark.parametrize("look", [1, 2, 3])
@pytest.mark.parametrize(("code", "cause"), [(ExitCode.STOPPED, "stop file"), (ExitCode.CRASHED, "crashed")])
def test_a_stop_file_is_not_lost_behind_another_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch, look: int, code: ExitCode, cause: str
) -> None:
    """A signal was noticed first; the file comes while the ranks save, or as they leave."""
    flag = StopFlag()
    flag._set(15)
    one = supervised(run, monkeypatch, flag, code=code, act=lambda n: run.stop_file.touch() if n == look else None)
    one.is_batch = True  # it would be requeued
    monkeypatch.setattr(Supervisor, "_exit_for_retry", lambda *words: pytest.fail("a person said stop"))
    assert one.supervise() == code
    assert read_event_lines(run, "train")[-1]["cause"] == cause and not run.stop_file.exists()


@pytest.mark.parametrize(
    ("job", "done", "cancelled"),
    [
        ("11", False, "16 20 15 14 13 12"),  # prepare: the whole chain, the newest first
        ("13", False, "16 20 15 14"),  # shard's last word: training, its successor, evaluations
        ("14", False, "20 15"), ("15", False, "16 20"), ("14", True, "15"), ("15", True, "16"), ("13", True, ""),
        ("30", False, ""), ("30", True, ""),  # an evaluation of one checkpoint: the next one runs after it all the same
    ],
)  # fmt: skip
def test_what_waits_in_vain_is_cancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch, job: str, done: bool, cancelled: str
) -> None:
    from slurm.query import job_states

    def submitted(stage: str, job_id: str, kind: str, *after: str, **more: object) -> None:
        write_event(run, "submitted", stage, job_id=job_id, executor="slurm", kind=kind, after=after, **more)

    submitted("prepare", "11", "afterok")
    submitted("shard", "12", "afterok", "11")
    submitted("shard", "13", "afterany", "12")
    submitted("train", "14", "afterok", "13")
    submitted("train", "15", "afternotok", "14")
    submitted("evaluate", "20", "afterok", "14")
    submitted("evaluate", "30", "afterok", step=7)
    submitted("evaluate", "31", "afterany", "30", step=14)
    submitted("train", "16", "afternotok", "15")
    write_event(run, "took_over", "train", job_id="15", predecessor="14", children=["20"])
    if job == "14":
        run.events_file.write_text("".join(run.events_file.read_text().splitlines(keepends=True)[:-2]))
    calls: list[str] = []
    pending = {"11", "12", "13", "14", "15", "16", "20", "31"} - {job}
    state = {j: JobState(j, "PENDING" if j in pending else "RUNNING") for j in map(str, range(10, 40))}
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: state[job.job_id] for job in jobs}
    )
    monkeypatch.setattr(job_states, "run_slurm_command", lambda *words: calls.append(" ".join(words)))
    monkeypatch.setattr(job_states, "cluster_name", lambda: None)
    stage = {"11": "prepare", "13": "shard", "30": "evaluate"}.get(job, "train")
    succession.cancel_unneeded_jobs(run, stage, replace(make_rank_info(0, 1, 1), job_id=job), is_done=done)
    assert calls == ([f"scancel {cancelled}"] if cancelled else [])


def test_a_successor_takes_over_what_waited_for_its_predecessor_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm.submit import sbatch

    for stage, job, kind, after in (
        ("prepare", "11", "afterok", []), ("shard", "12", "afterok", ["11"]), ("shard", "13", "afterany", ["12"]),
        ("train", "14", "afterok", ["13"]), ("prepare", "15", "afternotok", ["11"]),
    ):  # fmt: skip
        write_event(run, "submitted", stage, job_id=job, executor="slurm", kind=kind, after=after)
    calls: list[str] = []
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: JobState(job.job_id, "PENDING") for job in jobs}
    )
    monkeypatch.setattr(succession.job_states, "run_slurm_command", lambda *words: calls.append(" ".join(words)))
    monkeypatch.setattr(succession.job_states, "cluster_name", lambda: None)
    monkeypatch.setattr(sbatch, "submit_stage", lambda *words, **more: "16")
    assert succession.take_over(run, "prepare", replace(make_rank_info(0, 1, 1), job_id="15")) is None
    assert calls == ["scontrol update JobId=12 Dependency=afterok:15"]


def test_a_stop_is_not_told_by_the_signal_of_an_attempt_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_event(run, "started", "train", attempt=1)
    write_event(run, "stop_requested", "train", signal="SIGUSR2")
    one = supervised(run, monkeypatch)
    assert one.supervise() == ExitCode.STOPPED
    assert read_event_lines(run, "train")[-1]["cause"] == "signal", "these ranks did not say why"
    one = supervised(run, monkeypatch, act=lambda n: write_event(run, "stop_requested", "train", signal="SIGINT"))
    one.supervise()
    assert read_event_lines(run, "train")[-1]["cause"] == "SIGINT"


@pytest.mark.parametrize(
    ("noted", "reason", "stopped_s", "preempted"),
    [
        (None, "SIGTERM", 0.0, False),
        (None, "SIGTERM", 15.0, True),  # its ranks were signalled at the start of the grace time
        (None, "SIGUSR2", None, True),  # --signal=B:
        ("preempted", "SIGTERM", None, True),
        ("time_limit", "SIGUSR2", 15.0, False),
        ("requeued", "SIGTERM", None, False),
        (None, None, None, False),
    ],
)
def test_a_preemption_is_remembered_when_slurm_has_requeued_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch, noted: str | None, reason: str | None, stopped_s: float | None,
    preempted: bool,
) -> None:  # fmt: skip
    """`stopped_s`: how long before the supervisor got its signal the ranks noticed a stop."""
    one = supervised(run, monkeypatch)
    write_event(run, "started", "train", attempt=1, task=None)
    if stopped_s is not None:
        write_event(run, "stop_requested", "train", step=7, signal="SIGUSR2")
    one.flag.reason, one.flag.signal_time = reason, time.monotonic() + (stopped_s or 0.0)
    now = time.time() + (stopped_s or 0.0)
    monkeypatch.setattr(supervisor.time, "time", lambda: now)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: one.flag.signal_time)
    if noted:
        write_event(run, "stopping", "train", by=reason, cause=noted)
    one.rank_info = replace(make_rank_info(0, 1, 1), job_id="12")
    requeued = JobInfo("COMPLETING", 1, False, 100.0, True)
    cause, _ = determine_cause(ExitCode.STOPPED, one._gather_job_facts(requeued, ExitCode.STOPPED))
    assert cause == (ExitCode.PREEMPTED if preempted else ExitCode.REQUEUED)


def test_each_attempt_knows_what_time_is_left_then(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = JobInfo("RUNNING", 0, False, 100.0, False, submit_time=7.0)
    monkeypatch.setenv("SLURM_JOB_NAME", "by-hand")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    monkeypatch.setenv(TIME_LEFT_VARIABLE, "")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda job: facts)
    one = supervised(run, monkeypatch, code=ExitCode.DONE)
    one.on_slurm, left = False, []
    for waited in (0.0, 30.0, 100.0):  # for the lock, or the attempts before
        if one.job_end_time is not None:
            one.job_end_time -= waited
        one._run_attempt(0, "")
        left.append(float(os.environ[TIME_LEFT_VARIABLE]))
    assert [round(seconds, -1) for seconds in left] == [100.0, 70.0, 0.0] and left[2] == 0.0
    started = read_event_lines(run, "train", "started")[-1]
    assert [started[key] for key in ("cluster", "job_name", "job_submitted")] == ["here", "by-hand", 7.0]


def test_a_hang_names_the_rank_that_did_not_arrive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks wrote where they were; rank 0 left first, and rank 1 was behind."""

    def write_reports(look: int) -> None:
        for rank, number in ((0, 3), (1, 1)):
            told = {"rank": rank, "host": f"n{rank}", "step": 5, "number": number, "phase": "reduce", "stacks": "here"}
            write_json(run.stage_dir("train") / f"hang-rank-{rank}.json", {**told, "collectives": []})
        write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.HANG, "rank 0 was in phase 'reduce'")

    one = supervised(run, monkeypatch, code=ExitCode.HANG, act=write_reports)
    assert one.supervise() == ExitCode.HANG
    told = read_event_lines(run, "train")[-1]
    assert (told["event"], told["cause"], told["rank"], told["host"]) == ("failed", "hang", 1, "n1")
    assert "did not arrive" in told["message"] and "brought no new checkpoint" in told["message"]


class Clock:
    """Hours that pass at once, in a supervisor's eyes: `act` is called with each second that it slept until."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[float], None] = lambda second: None) -> None:
        self.now, self.slept, self.act = 0.0, list[float](), act
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.act(self.now)


def in_job(one: Supervisor, monkeypatch: pytest.MonkeyPatch, job: str, restarts: int = 0) -> list[Any]:
    """Make it one of a batch job; what it did with what waits for that, and how it left for another attempt."""
    did: list[Any] = []
    one.on_slurm = one.is_batch = True
    one.nodes, one.job_id = ["n1"], job
    one.rank_info = replace(make_rank_info(0, 1, 1), job_id=job, restart_count=restarts)
    monkeypatch.setattr(supervisor, "apply_site_environment", lambda *words: None)
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda *words: None)
    monkeypatch.setattr(supervisor.capacity, "find_placement_problem", lambda *words: None)
    monkeypatch.setattr(supervisor.succession, "take_over", lambda *words: None)
    monkeypatch.setattr(
        supervisor.succession, "cancel_unneeded_jobs", lambda *words, is_done: did.append("cancelled what waits")
    )

    def leave(self: Supervisor, ended: supervisor.AttemptEnd, facts: StopFacts) -> ExitCode:
        did.append((ended.cause.name, facts.has_progress))
        return ended.cause

    monkeypatch.setattr(Supervisor, "_exit_for_retry", leave)
    return did


@pytest.mark.parametrize("kind", ["requeued", "successor"])
def test_an_attempt_before_that_does_not_let_go_is_waited_for_and_then_a_node_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its process hangs in the kernel, say: nothing that waits may be cancelled for that."""
    before, job = ("5", "5") if kind == "requeued" else ("5", "6")
    write_event(run, "started", "train", attempt=1, slurm_job=before, job_id=before, restarts=0, standing="step 0")
    if kind == "successor":
        write_event(run, "submitted", "train", job_id=job, executor="slurm", after=[before], kind="afternotok")
    assert run.lock_stage("train") is not None
    one = supervised(run, monkeypatch, start=lambda *words: pytest.fail("no two at once"))
    did, clock = in_job(one, monkeypatch, job, restarts=int(kind == "requeued")), Clock(monkeypatch)
    assert one.supervise() == ExitCode.NODE_FAILURE
    assert did == [("NODE_FAILURE", False)], "back into the queue, nothing cancelled"
    assert 900 <= clock.now < 910 and min(clock.slept) >= 1.0, "a flock is a request to the file system's server"
    told = read_event_lines(run, "train")[-1]
    assert (told["event"], told["cause"], told["attempt"]) == ("failed", "node_failure", 2)
    assert f"pid {os.getpid()}" in told["message"] and not told.get("final")


def test_a_lock_that_goes_late_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_event(run, "started", "train", attempt=1, slurm_job="5", job_id="5", restarts=0, standing="step 0")
    held = run.lock_stage("train") or 0
    one = supervised(run, monkeypatch, code=ExitCode.OUT_OF_MEMORY)
    did = in_job(one, monkeypatch, "5", restarts=1)
    clock = Clock(monkeypatch, lambda second: os.close(held) if second == 600 else None)
    assert one.supervise() == ExitCode.OUT_OF_MEMORY, "of ranks that started"
    assert 600 <= clock.now < 605 and "no ranks were started" not in read_event_lines(run, "train")[-1]["message"]
    assert did == ["cancelled what waits"], "as after any lack of memory without a new checkpoint"


def test_a_stop_ends_the_wait_for_the_attempt_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_event(run, "started", "train", attempt=1, slurm_job="5", job_id="5", restarts=0, standing="step 0")
    assert run.lock_stage("train") is not None
    one = supervised(run, monkeypatch)
    did, clock = in_job(one, monkeypatch, "5", restarts=1), Clock(monkeypatch, lambda second: one.flag._set(15))
    assert one.supervise() == ExitCode.STOPPED and clock.now < 5 and did == [("STOPPED", False)]
    one = supervised(run, monkeypatch)
    did, clock = in_job(one, monkeypatch, "5", restarts=2), Clock(monkeypatch, lambda second: run.stop_file.touch())
    assert one.supervise() == ExitCode.STOPPED and clock.now < 5 and did == ["cancelled what waits"]
    assert read_event_lines(run, "train")[-1]["cause"] == "stop file" and not run.stop_file.exists()


def test_a_stage_that_another_job_runs_is_left_to_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeued or not: the attempt that holds it is none of this job's."""
    write_event(run, "started", "train", attempt=1, slurm_job="9", job_id="9", restarts=0, standing="step 0")
    assert run.lock_stage("train") is not None
    for restarts in (0, 1):
        one = supervised(run, monkeypatch)
        in_job(one, monkeypatch, "5", restarts)
        clock = Clock(monkeypatch)
        with pytest.raises(UserError, match="already running"):
            one.supervise()
        assert 60 <= clock.now < 70 and len(read_event_lines(run, "train")) == 1


@pytest.mark.parametrize("number", [errno.ESHUTDOWN, errno.EIO, errno.ESTALE])
def test_a_file_system_that_is_away_for_a_while_stops_no_rank(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """As of a Lustre client that was evicted: the ranks, on other nodes, may have seen nothing of it."""
    stat, away = Path.stat, [True]

    def evicted(self: Path, **options: Any) -> os.stat_result:
        if away[0] and self in (run.stop_file, run.cancelled_file):
            raise OSError(number, os.strerror(number), str(self))
        return stat(self, **options)

    one = supervised(
        run, monkeypatch, looks=30, code=ExitCode.DONE, act=lambda look: away.append(away.pop() and look < 30)
    )
    monkeypatch.setattr(one, "stage_module", SimpleNamespace(missing_outputs=lambda run: "no" if away[0] else None))
    monkeypatch.setattr(Path, "stat", evicted)
    monkeypatch.setattr(Run, "check_not_cancelled", lambda self: None)  # which was before
    assert one.supervise() == ExitCode.DONE
    assert capsys.readouterr().err.count("whether a stop was requested") == 1, "said once"


def test_a_stop_is_passed_on_though_its_event_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervised(run, monkeypatch)
    append_event = Run.append_event

    def fail_for_stopping(self: Run, event: Event) -> None:
        if isinstance(event, Stopping):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        append_event(self, event)

    monkeypatch.setattr(Run, "append_event", fail_for_stopping)
    one.flag._set(15)
    assert one.supervise() == ExitCode.STOPPED


@pytest.mark.parametrize(("seconds", "code"), [(2300.0, ExitCode.STOPPED), (2600.0, ExitCode.HANG)])
def test_ranks_that_were_asked_to_stop_may_save_for_as_long_as_a_save_may_take(
    run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, code: ExitCode
) -> None:
    """`recovery.save_s` is 1800: beyond it the ranks themselves call it a hang (pipeline/resilience/watchdog.py)."""
    clock = Clock(monkeypatch)
    one = supervised(run, monkeypatch, looks=20, act=lambda look: clock.sleep(seconds / 20))
    one.flag._set(15)
    assert one.supervise() == code
    assert code == ExitCode.STOPPED or "2400 s" in read_event_lines(run, "train")[-1]["message"]


def test_an_evaluation_that_cannot_be_submitted_ends_no_training_and_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, clock, tried = background.EvaluationSubmitter(run), Clock(monkeypatch), list[float]()
    fails: list[Exception] = [
        UserError("sbatch refused"), FileNotFoundError(2, "no sbatch"), RuntimeError("no sense"), OSError(116, "stale"),
        OSError(116, "stale"),
    ]  # fmt: skip

    def submit(*words: Any, **more: Any) -> None:
        tried.append(clock.now)
        if fails:
            raise fails.pop(0)

    monkeypatch.setattr(background, "time", supervisor.time)
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [2])
    monkeypatch.setattr(background, "count_training_steps", lambda *words: 9)
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", submit)
    one.is_enabled = True
    while clock.now < 7200:
        one.poll()
        clock.sleep(1.0)
    assert tried == [0, 60, 180, 420, 900, 1860], "a minute later, then ever later, until it goes"
    told = [e["message"] for e in read_event_lines(run, "evaluate", "evaluation_not_submitted")]
    assert [words.split(":")[0] for words in told] == ["sbatch refused", "FileNotFoundError", "RuntimeError", "OSError"]


def test_a_successor_trains_without_one_of_its_own_and_asks_for_it_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_event(run, "submitted", "train", job_id="15", executor="slurm", kind="afternotok", after=["14"])
    refused, submitted = [UserError("sbatch refused the job: too many jobs")], list[Any]()

    def submit(run: Run, stage: str, after: list[str], *, kind: str, **more: Any) -> None:
        if refused:
            raise refused.pop()
        submitted.append((stage, after, kind))

    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", submit)
    monkeypatch.setattr(succession.job_states, "query_job_states", lambda jobs: {})
    monkeypatch.setattr(succession, "_was_cancelled", lambda *words: False)
    assert succession.take_over(run, "train", replace(make_rank_info(0, 1, 1), job_id="15")) is None, "it trains"
    assert "too many jobs" in capsys.readouterr().err and read_event_lines(run, "train")[-1]["event"] == "took_over"
    assert succession.hand_over(run, "train", "15") is None and submitted == [("train", ["15"], "afternotok")]


@pytest.mark.parametrize(
    ("sbatch", "words"), [("exit 1", "exit code 1"), ("echo accepted, perhaps", "accepted, perhaps")]
)
def test_what_an_unclear_sbatch_said_is_in_the_message(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, words: str
) -> None:
    from slurm.submit.sbatch import submit_stage

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    with pytest.raises(UserError, match=rf"not known whether Slurm accepted the job.*{words}"):
        submit_stage(run, "train", [], kind="afternotok", patience_s=0.5)


RUNNING = JobInfo("RUNNING", 0, False, None, True)


def leave_after_crash(one: Supervisor) -> ExitCode:
    """Exit after a crash that may be retried."""
    facts = StopFacts(
        cause=ExitCode.CRASHED,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=one.run.config.recovery,
        is_batch=True,
        was_signalled=False,
        job=JobFacts(one.run.config.site),
    )
    return one._exit_for_retry(supervisor.AttemptEnd(ExitCode.CRASHED), facts)


@pytest.mark.parametrize(
    ("left_s", "back_s", "ends"),
    [
        (None, 3000.0, "requeued"), (None, math.inf, "did not respond for 36"), (600.0, 3000.0, "requeued"),
        (36000.0, 30000.0, "requeued"), (36000.0, math.inf, "did not respond for 357"),
    ],
)  # fmt: skip
def test_a_controller_that_is_away_is_asked_until_the_job_must_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, left_s: float | None, back_s: float, ends: str
) -> None:
    """An hour at least: without a controller the job's limit is not kept. Only one that answers can refuse."""
    clock, asked = Clock(monkeypatch), list[float]()

    def facts(*words: object) -> JobInfo | None:
        asked.append(clock.now)
        return RUNNING if clock.now >= back_s else None

    one = supervised(run, monkeypatch)
    one.rank_info, one.job_end_time = replace(make_rank_info(0, 1, 1), job_id="5"), left_s
    monkeypatch.setattr(supervisor.current_job, "read_job_info", facts)
    monkeypatch.setattr(supervisor.current_job, "requeue_job", lambda *words: clock.now >= back_s)
    monkeypatch.setattr(supervisor.current_job, "excluded_nodes_at_requeue", lambda *words: None)
    monkeypatch.setattr("slurm.query.preemption.is_requeued_on_exit", lambda *words: False)
    assert leave_after_crash(one) == ExitCode.CRASHED
    told = read_event_lines(run, "train")[-1]
    assert ends in f"{told['event']} {told.get('message')}"
    assert "refused" not in told.get("message", "") and len(asked) < 20 + clock.now / 60


def test_a_signal_wakes_who_waits_for_the_controller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is back ends at once a job whose time is over: KILL comes half a minute behind TERM."""
    one = supervised(run, monkeypatch)

    def signal_at_1000(second: float) -> None:
        if second >= 1000 and not one.flag.signal_count:
            one.flag._handle(15, None)

    clock = Clock(monkeypatch, signal_at_1000)
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda job: RUNNING if clock.now >= 1000 else None)
    assert one._wait_for_job_info(0)[0] == RUNNING and clock.now < 1001


def test_a_controller_that_goes_away_between_two_questions_is_asked_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, clock, requeues = supervised(run, monkeypatch), Clock(monkeypatch), list[float]()
    one.rank_info = replace(make_rank_info(0, 1, 1), job_id="5")

    def requeue(*words: object) -> bool:
        requeues.append(clock.now)
        return clock.now >= 1000

    away = lambda: bool(requeues) and clock.now < 1000  # noqa: E731
    monkeypatch.setattr(supervisor.current_job, "read_job_info", lambda job: None if away() else RUNNING)
    monkeypatch.setattr(supervisor.current_job, "requeue_job", requeue)
    monkeypatch.setattr(supervisor.current_job, "excluded_nodes_at_requeue", lambda *words: None)
    monkeypatch.setattr("slurm.query.preemption.is_requeued_on_exit", lambda *words: False)
    assert leave_after_crash(one) == ExitCode.CRASHED
    assert read_event_lines(run, "train")[-1]["event"] == "requeued" and len(requeues) == 2
    monkeypatch.setattr(supervisor.current_job, "requeue_job", lambda *words: False)
    leave_after_crash(one)
    assert "refused to requeue" in read_event_lines(run, "train")[-1]["message"]


@pytest.mark.parametrize(("early_stop", "submitted"), [({"steps": 40}, []), ({"steps": 30}, [7]), (None, [7])])
def test_the_final_checkpoint_is_left_to_the_evaluation_of_the_chain(
    run: Run, monkeypatch: pytest.MonkeyPatch, early_stop: dict[str, int] | None, submitted: list[int]
) -> None:
    """A callback may complete a training before `train.steps`: its last checkpoint says so."""
    manifest = {"step": 7, "samples_consumed": 28, "layout": {}, "files": {}, "extra": {"early_stop": early_stop}}
    checkpoint = run.checkpoints_dir / checkpoint_name(7)
    checkpoint.mkdir()
    write_json(checkpoint / MANIFEST_FILE, add_checksum(manifest))
    steps: list[int] = []
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda *arguments, **options: steps.append(options["step"]))
    monkeypatch.setattr(background, "count_training_steps", lambda *arguments: 40)
    evaluations = background.EvaluationSubmitter(run)
    evaluations.is_enabled = True
    evaluations.poll()
    assert steps == submitted and not read_event_lines(run, "evaluate", "evaluation_not_submitted")
