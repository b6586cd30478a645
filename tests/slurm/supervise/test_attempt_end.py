"""Tests of what happens at the end of an attempt: progress, the first failed rank, retries, and killed supervisors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import append_line
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.events import StageState
from pipeline.run.failure import write_error_report
from slurm.query import current_job, slurm_commands
from slurm.query.current_job import JobInfo
from slurm.query.job_states import UNKNOWN, JobState
from slurm.supervise import attempt_end
from slurm.supervise.attempt_end import (
    end_unfinished_attempt,
    find_failure,
    get_rank_log,
    measure_log_sizes,
    read_progress_marker,
)
from slurm.supervise.decision import JobFacts, StopFacts
from slurm.supervise.launch import RankExit, SrunLauncher
from tests.slurm.query.test_causes import ECC_ERROR, make_job_info
from tests.support.events import read_event_lines, write_event
from tests.support.ranks import make_rank_info
from tests.support.tiny import write_config

# ---- progress


def test_progress_is_a_new_checkpoint_a_repaired_checkpoint_or_a_decision(tmp_path: Path) -> None:
    """A decision, for example to skip a bad step, is a line of decisions.jsonl."""
    run = Run.create(load_config(write_config(tmp_path, "tiny", 20)))
    markers = [read_progress_marker(run, "train")]

    def changes_progress(event: str, step: int) -> bool:
        """Write an event and return True if it changes the progress marker."""
        write_event(run, event, "train", step=step)
        markers.append(read_progress_marker(run, "train"))
        return markers[-1] != markers[-2]

    assert changes_progress("saved", 4) and changes_progress("saved", 8)
    assert not changes_progress("saved", 8) and not changes_progress("saved", 4), "these steps were saved before"
    assert not changes_progress("damaged", 8)
    assert changes_progress("saved", 8), "a checkpoint that replaces a damaged one is progress"
    assert not changes_progress("saved", 8)
    (run.checkpoints_dir / checkpoint_name(12)).mkdir()
    markers.append(read_progress_marker(run, "train"))
    assert markers[-1] != markers[-2], "a checkpoint without an event is progress"
    append_line(run.decisions_file, "{}")
    assert read_progress_marker(run, "train") != markers[-1]


# ---- which rank failed


def test_first_failure_is_not_a_rank_that_only_lost_a_peer() -> None:
    peer_lost, disk_full, killed = (
        f"srun: error: n{rank}: task {rank}: {reason}\n"
        for rank, reason in [(1, "Exited with exit code 76"), (0, "Exited with exit code 21"), (2, "Killed")]
    )
    assert SrunLauncher.find_first_failure(peer_lost + disk_full + killed, 76) == RankExit(0, 21, "n0")
    assert SrunLauncher.find_first_failure(peer_lost + killed, 76) == RankExit(2, -9, "n2")
    assert SrunLauncher.find_first_failure(peer_lost, 76) == RankExit(1, 76, "n1")
    assert SrunLauncher.find_first_failure("nothing", 1) is None


@pytest.mark.parametrize("target", ["vision", "vision.net"])
def test_message_shows_only_the_frames_of_the_users_module(tmp_path: Path, target: str) -> None:
    """The module in `model.target` is that of the user. If no frame is in this module, the message keeps all frames.

    The name of another module, visionary.py, begins with the same letters.
    """
    config = load_config(write_config(tmp_path))
    model = config.model.model_copy(update={"target": target})
    run = Run(tmp_path / "run", config.model_copy(update={"model": model}))
    run.stage_dir("train").mkdir(parents=True, exist_ok=True)
    frames = [
        f'  File "{run.code_dir}/{name}", line 7, in forward\n    y = self.layer(x)\n        ^^^^^^^^^^^^^\n'
        for name in (
            "pipeline/train/engine.py",
            "visionary.py",
            f"{target.replace('.', '/')}.py",
            "/torch/nn/linear.py",
        )
    ]
    head = "Traceback (most recent call last):\n"
    tail = "RuntimeError: mat1 and mat2\n  with shapes (1x3 and 64x64)\n"
    write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.CRASHED, "".join([head, *frames, tail]))
    message = find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)]).fields["message"]
    assert message.partition("\n")[2] == head + frames[2] + tail
    write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.CRASHED, "".join([head, *frames[:2], tail]))
    message = find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)]).fields["message"]
    assert message.partition("\n")[2] == head + "".join(frames[:2]) + tail


@pytest.mark.parametrize(
    "messages",
    [
        "srun: error: n1: task 1: Out Of Memory\n",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: n1: task 1: Killed\n",
        "srun: error: n1: task 1: Killed\nslurmstepd: error: Detected 1 oom-kill event(s) in step 5.0 cgroup. Some of "
        "your processes may have been killed by the cgroup out-of-memory handler.\n",
    ],
)
def test_out_of_memory_kill_is_recognized_in_the_messages_of_slurm(tmp_path: Path, messages: str) -> None:
    rank_exit = SrunLauncher.find_first_failure("srun: error: n0: task 0: Exited with exit code 76\n" + messages, 137)
    assert rank_exit == RankExit(1, ExitCode.OUT_OF_MEMORY, "n1")
    run = Run.create(load_config(write_config(tmp_path)))
    for rank, code in ((0, ExitCode.CRASHED), (2, ExitCode.PEER_LOST)):
        write_error_report(run, "train", make_rank_info(rank, 3, 1), code, "lost rank 1")
    failure = find_failure(run, "train", [rank_exit])
    assert (failure.cause, failure.fields["rank"], failure.fields["host"]) == (ExitCode.OUT_OF_MEMORY, 1, "n1")
    write_error_report(run, "train", make_rank_info(1, 3, 1), ExitCode.OUT_OF_MEMORY, "CUDA out of memory")
    failure = find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)])
    assert failure.fields["rank"] == 0, "the earliest report must count"


def test_failed_gpu_is_found_in_the_log_if_nccl_aborts_the_rank(tmp_path: Path) -> None:
    """NCCL aborts the rank with SIGABRT (-6), so the rank writes no report. Only new lines of the log count."""
    run = Run.create(load_config(write_config(tmp_path)))
    logs = [get_rank_log(run, "train", rank) for rank in range(3)]
    for log in logs:
        log.write_text(f"what(): {ECC_ERROR}, in an earlier attempt\n")
    log_sizes = measure_log_sizes(run, "train")
    aborted_ranks = [RankExit(0, -6), RankExit(1, -6, "n2")]
    assert find_failure(run, "train", aborted_ranks, log_sizes=log_sizes).cause == ExitCode.CRASHED
    with open(logs[1], "a") as log_file:
        log_file.write(
            f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {ECC_ERROR}\n"
        )
    write_error_report(run, "train", make_rank_info(2, 3, 1), ExitCode.PEER_LOST, "lost rank 1")
    failure = find_failure(run, "train", aborted_ranks, log_sizes=log_sizes)
    assert failure.cause == ExitCode.BAD_NODE
    assert failure.fields == {"rank": 1, "host": "n2", "message": f"rank 1 on n2:\nwhat():  {ECC_ERROR}"}
    assert find_failure(run, "train", [RankExit(1, -9, "n2")], log_sizes=log_sizes).cause == ExitCode.CRASHED, (
        "a rank that another process killed (SIGKILL, -9) does not show a failed GPU"
    )


def test_full_disk_is_detected_without_a_report_of_a_rank(small_disk: Path) -> None:
    """The run directory is on a full disk, so a rank cannot write its error report there."""
    run = Run.create(load_config(write_config(small_disk, "tiny", 20)))
    assert run.describe_write_error() is None
    with open(small_disk / "filler", "wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    assert "no space is left" in (run.describe_write_error() or "")
    assert not list(run.path.glob(".probe*"))


# ---- the exit of a batch job that may be retried


def exit_for_retry(
    run: Run, job_infos: list[JobInfo | None], monkeypatch: pytest.MonkeyPatch, was_signalled: bool = False
) -> tuple[ExitCode, list[str]]:
    """Let a supervisor exit after its ranks ran out of memory. Return its exit code and its requests to Slurm.

    Args:
        run: the run.
        job_infos: result of each query of the job; None if the controller does not respond. The last result repeats.
        monkeypatch: replaces the commands of Slurm and the clock.
        was_signalled: whether the supervisor received a signal.
    """
    from slurm.supervise import supervisor

    requests: list[str] = []

    def requeue(*arguments: object) -> bool:
        requests.append("requeue")
        return True

    query_results = itertools.chain(job_infos, itertools.repeat(job_infos[-1]))
    clock = itertools.count(step=5)  # each call of time.monotonic() advances the clock by 5 s
    monkeypatch.setattr(
        current_job,
        "run_slurm_command",
        lambda *command, **_: next(query_results) if command[0] == "scontrol" else None,
    )
    monkeypatch.setattr(current_job, "parse_job_info", lambda info: info)
    monkeypatch.setattr(current_job, "requeue_job", requeue)
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command, **_: requests.append(command[0]))
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: None)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    job_supervisor = supervisor.Supervisor(run, "train", StopFlag())
    job_supervisor.rank_info = make_rank_info(0, 1, 1)
    job_supervisor.stop_flag.reason = "SIGTERM" if was_signalled else None
    facts = StopFacts(
        cause=ExitCode.OUT_OF_MEMORY,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=run.config.recovery,
        is_batch=True,
        was_signalled=was_signalled,
        job=JobFacts(run.config.site),
    )
    code = job_supervisor._exit_for_retry(
        supervisor.AttemptEnd(ExitCode.OUT_OF_MEMORY, fields={"message": "rank 1"}), facts
    )
    return code, requests


def test_job_that_is_cancelled_after_its_ranks_exited_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state COMPLETING shows the cancellation. If the controller never responds, a signal may show it."""
    run = Run.create(load_config(write_config(tmp_path)))
    assert exit_for_retry(run, [None, None, make_job_info(state="COMPLETING")], monkeypatch) == (ExitCode.CANCELLED, [])
    assert read_event_lines(run, "train")[-1]["event"] == "cancelled"
    result = exit_for_retry(run, [None], monkeypatch, was_signalled=True)
    assert result == (ExitCode.OUT_OF_MEMORY, []), "the job may have been cancelled, so it must not be requeued"
    assert "did not report" in read_event_lines(run, "train")[-1]["message"]
    assert exit_for_retry(run, [None], monkeypatch) == (ExitCode.OUT_OF_MEMORY, ["requeue"]), (
        "the job was not cancelled, because a cancelled job receives a signal"
    )
    assert exit_for_retry(run, [None, make_job_info()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, ["requeue"])
    assert read_event_lines(run, "train")[-1]["event"] == "requeued"


def test_job_submits_its_successor_if_the_site_does_not_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If sbatch refuses the successor, the stage fails and the jobs that wait for it are cancelled."""
    from slurm.submit import sbatch
    from slurm.supervise import supervisor

    run = Run.create(load_config(write_config(tmp_path), ["site.requeue=false"]))
    submitted_stages: list[object] = []
    cancel_calls: list[bool] = []  # value of `is_done` in each call of `cancel_unneeded_jobs`

    def submit(run: Run, stage: str, after: Sequence[str], *, dependency_type: str, **options: object) -> None:
        submitted_stages.append(stage)
        if len(submitted_stages) == 1:
            raise UserError("slurm.job_refused", "sbatch refused the job")
        write_event(run, "submitted", stage, job_id="8", after=list(after), kind=dependency_type)

    monkeypatch.setattr(sbatch, "submit_stage", submit)
    monkeypatch.setattr(
        supervisor.Supervisor, "cancel_unneeded_jobs", lambda self, is_done: cancel_calls.append(is_done)
    )
    assert exit_for_retry(run, [make_job_info()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, [])
    event = read_event_lines(run, "train")[-1]
    assert event["event"] == "failed" and "no successor" in event["message"] and cancel_calls == [False]
    for _ in range(2):
        assert exit_for_retry(run, [make_job_info()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, [])
        assert read_event_lines(run, "train")[-1]["event"] == "handed_over"
    assert len(submitted_stages) == 2 and cancel_calls == [False], "the job must have only one successor"


@pytest.mark.parametrize(
    ("state", "recorded_cause", "is_retried"),
    [
        ("CANCELLED", "time_limit", False), ("TIMEOUT", "cancelled", True), ("NODE_FAIL", None, True),
        (UNKNOWN, "cancelled", False), (UNKNOWN, "preempted", True), (UNKNOWN, None, True),
    ],
)  # fmt: skip
def test_successor_does_not_continue_after_a_cancelled_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, recorded_cause: str | None, is_retried: bool
) -> None:
    """Job 7 is the successor of job 6, whose final state is `state`. If Slurm does not know it, the event counts."""
    from slurm.submit import sbatch
    from slurm.supervise import succession

    run = Run.create(load_config(write_config(tmp_path)))
    write_event(run, "submitted", "train", job_id="7", executor="slurm", after=["6"], kind="afternotok")
    write_event(run, "started", "train", job_id="6", slurm_job="6", attempt=1)
    if recorded_cause:
        write_event(run, "stopping", "train", job_id="6", by="SIGTERM", cause=recorded_cause)
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: JobState(job.job_id, state) for job in jobs}
    )
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command, **_: "")
    monkeypatch.setattr(sbatch, "submit_stage", lambda *arguments, **options: "8")
    reason = succession.take_over(run, "train", replace(make_rank_info(0, 1, 1), job_id="7"))
    assert (reason is None) == is_retried
    assert bool(read_event_lines(run, "train", "took_over")) == is_retried


# ---- attempts whose supervisor was killed


def make_run_with_open_attempt(folder: Path, *events: tuple[str, dict[str, Any]], overrides: Sequence[str] = ()) -> Run:
    """Return a run whose train stage was started in job 6 and saved nothing. Job 7 is the successor of job 6.

    Args:
        folder: folder for the config and the run.
        events: names and fields of further events of job 6.
        overrides: overrides of config keys.
    """
    folder.mkdir(exist_ok=True)
    run = Run.create(load_config(write_config(folder), overrides))
    write_event(run, "submitted", "train", job_id="6", executor="slurm", after=[], kind="afterok")
    write_event(run, "submitted", "train", job_id="7", executor="slurm", after=["6"], kind="afternotok")
    write_event(
        run,
        "started",
        "train",
        job_id="6",
        slurm_job="6",
        attempt=1,
        restarts=0,
        standing=read_progress_marker(run, "train"),
    )
    for event, fields in events:
        write_event(run, event, "train", job_id="6", **fields)
    return run


def close_attempt(run: Run, job_id: str, restarts: int = 0) -> tuple[ExitCode | None, str | None, list[dict[str, Any]]]:
    """Call `end_unfinished_attempt` as job `job_id`, which was requeued `restarts` times.

    Returns:
        The exit code and the reason if the stage must not start, otherwise None and None; then the new events.
    """
    count_before = len(read_event_lines(run, "train"))
    rank_info = replace(make_rank_info(0, 1, 1), job_id=job_id, restart_count=restarts)
    exit_code, reason = end_unfinished_attempt(run, "train", rank_info, None) or (None, None)
    return exit_code, reason, read_event_lines(run, "train")[count_before:]


@pytest.fixture
def set_slurm_state(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the state that Slurm reports for all jobs."""

    def set_state(state: str) -> None:
        monkeypatch.setattr(attempt_end, "read_job_info", lambda job: None)
        monkeypatch.setattr(
            attempt_end, "query_job_states", lambda jobs: {job: JobState(job.job_id, state) for job in jobs}
        )

    return set_state


@pytest.mark.parametrize(
    ("state", "stopping_fields", "cause", "end_event", "is_retried"),
    [
        ("NODE_FAIL", None, "node_failure", "failed", True), ("PREEMPTED", None, "preempted", "preempted", True),
        ("TIMEOUT", None, "time_limit", "failed", False), (UNKNOWN, None, "crashed", "failed", False),
        ("CANCELLED", None, "cancelled", "cancelled", False),
        ("OUT_OF_MEMORY", None, "out_of_memory", "failed", False),
        ("FAILED", {"by": "SIGTERM", "cause": "cancelled"}, "cancelled", "cancelled", False),
        ("NODE_FAIL", {"by": "SIGTERM", "cause": "cancelled"}, "node_failure", "failed", True),
        ("FAILED", {"by": "cancelled"}, "cancelled", "cancelled", False),
        ("FAILED", {"by": "stop file"}, "stop file", "stopped", False),
    ],
)  # fmt: skip
def test_successor_writes_the_end_of_an_attempt_whose_supervisor_was_killed(
    tmp_path: Path, set_slurm_state: Callable[[str], None], state: str, stopping_fields: dict[str, str] | None,
    cause: str, end_event: str, is_retried: bool,
) -> None:  # fmt: skip
    """Job 7 is the successor. It determines the cause from the state of job 6 and from the event `stopping`.

    The attempt made no progress. Therefore, the stage is retried only after a cause outside of the run, such as a
    failed node.
    """
    set_slurm_state(state)
    run = make_run_with_open_attempt(tmp_path, *([("stopping", stopping_fields)] if stopping_fields else []))
    code, _, events = close_attempt(run, "7")
    assert (code is None) == is_retried
    assert [event["event"] for event in events] == [end_event, *["handed_over"] * is_retried]
    assert {event["cause"] for event in events} == {cause}
    assert code in (None, ExitCode.__members__.get(cause.upper(), ExitCode.STOPPED))
    second_code, _, second_events = close_attempt(run, "7")
    assert second_code == code and second_events == [], "a second call must return the same code and write no event"


def test_number_of_retries_after_killed_supervisors_is_limited(
    tmp_path: Path, set_slurm_state: Callable[[str], None]
) -> None:
    """Each attempt loses its node before it makes progress. Two retries are allowed, so the third attempt is the last.

    Jobs 6 to 8 run the attempts 1 to 3. Job 9 must not start the stage.
    """
    set_slurm_state("NODE_FAIL")
    run = make_run_with_open_attempt(tmp_path, overrides=["recovery.max_restarts_without_progress=2"])
    job_id = 7
    while (result := close_attempt(run, str(job_id)))[0] is None:
        write_event(run, "submitted", "train", job_id=str(job_id + 1), after=[str(job_id)], kind="afternotok")
        fields = {"job_id": str(job_id), "slurm_job": str(job_id), "standing": read_progress_marker(run, "train")}
        write_event(run, "started", "train", attempt=job_id - 5, restarts=0, **fields)
        job_id += 1
        assert job_id < 20, "the number of retries is not limited"
    _, reason, new_events = result
    assert job_id == 9 and "3 attempts in a row" in (reason or "") and new_events[-1]["event"] == "failed"
    write_event(run, "resumed")
    assert close_attempt(run, str(job_id))[0] is None, "`resume` must reset the limit"


def test_requeued_job_applies_the_budgets_after_a_killed_supervisor(tmp_path: Path) -> None:
    """The budget allows one retry after a node failure, so the second restart of job 6 is rejected."""
    run = make_run_with_open_attempt(tmp_path, overrides=["recovery.budgets.node_failure=1"])
    _, _, events = close_attempt(run, "6", 1)
    assert [event["event"] for event in events] == ["failed", "requeued"]
    write_event(run, "started", "train", job_id="6", slurm_job="6", attempt=2, restarts=1, standing="step 0")
    code, reason, events = close_attempt(run, "6", 2)
    assert code == ExitCode.NODE_FAILURE and "recovery.budgets.node_failure: 1" in str(reason)
    assert "not retried" in events[-1]["message"] and len(events) == 1


def test_budget_is_charged_if_the_supervisor_was_killed_after_it_wrote_the_end(tmp_path: Path) -> None:
    """The supervisor wrote the end event of the attempt, but not the event of the retry.

    If the end event says that the stage failed permanently, only a user may start the stage again.
    """
    run = make_run_with_open_attempt(tmp_path, ("preempted", {"cause": "preempted", "exit_code": 71}))
    _, _, events = close_attempt(run, "6", 1)
    assert [(event["event"], event.get("budget")) for event in events] == [("requeued", "preempted")]
    assert close_attempt(run, "6", 1)[2] == [], "a second call must write no event"
    failed_run = make_run_with_open_attempt(tmp_path / "failed", ("failed", {"cause": "crashed", "exit_code": 1}))
    assert close_attempt(failed_run, "6", 1)[:2] == (None, None), "a user may requeue a job that failed permanently"
    assert close_attempt(failed_run, "7")[0] == ExitCode.CRASHED, "a successor must not continue a failed stage"
    open_run = make_run_with_open_attempt(tmp_path / "open")
    assert close_attempt(open_run, "99")[0] is None, "a user may start the stage in another job"


def test_open_attempt_of_a_sweep_point_in_a_job_array_is_closed(tmp_path: Path) -> None:
    run = make_run_with_open_attempt(tmp_path)
    end_unfinished_attempt(
        run, "train", replace(make_rank_info(0, 1, 1), job_id="6", restart_count=1, array=(3, 4)), None
    )
    assert [event["event"] for event in read_event_lines(run, "train")[-2:]] == ["failed", "requeued"]


def test_resume_starts_a_stage_whose_successor_was_cancelled(
    tmp_path: Path, set_slurm_state: Callable[[str], None]
) -> None:
    """Job 9 was submitted by `resume`. It is not a successor of job 6, so it may start the stage."""
    set_slurm_state("CANCELLED")
    run = make_run_with_open_attempt(
        tmp_path, ("cancelled", {"cause": "cancelled", "exit_code": 74, "message": "job 5"})
    )
    assert close_attempt(run, "9") == (None, None, [])
