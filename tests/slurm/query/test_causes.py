"""Causes and budgets: what Slurm says of a job, what it is charged to, and when a stage may not go on by itself."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import append_line
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.config.sections import RecoveryConfig, RetryBudgets
from pipeline.config.site import SiteConfig
from pipeline.run.attempts import explain_no_retry, get_budget_key
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.run.events import StageState, read_stage_state
from pipeline.run.failure import explain_error, write_error_report
from slurm.query import current_job, slurm_messages
from slurm.query.current_job import JobInfo, find_failed_nodes, parse_job_info
from slurm.query.job_states import UNKNOWN, JobState
from slurm.supervise import attempt_end
from slurm.supervise.attempt_end import (
    close_open_attempt,
    find_failure,
    get_rank_log,
    measure_log_sizes,
    read_progress_marker,
)
from slurm.supervise.decision import (
    JobFacts,
    NextAction,
    StopFacts,
    choose_next_action,
    determine_cause,
    infer_stop_cause,
)
from slurm.supervise.launch import RankExit, SrunLauncher
from tests.support.events import make_event, parse_events, read_event_lines, write_event
from tests.support.ranks import make_rank_info
from tests.support.tiny import write_config

# what scontrol of Slurm 22.05 printed; the comment was chosen to mislead
SHOWN = """JobId=1 JobName=j.sh
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime={ran} TimeLimit={limit} TimeMin=N/A
   StartTime=2026-11-21T05:42:23 EndTime=2026-11-21T05:42:30 Deadline=N/A
   PreemptEligibleTime=2026-11-21T05:42:23 PreemptTime={preempt}
   NodeList=n[1-4]
   Comment=sluice PreemptTime=2026-01-01T00:00:00 JobState=CANCELLED Restarts=7
"""


def shown(
    state: str = "RUNNING", restarts: int = 0, ran: str = "00:00:03", limit: str = "00:10:00", preempt: str = "None"
) -> JobInfo:
    return parse_job_info(SHOWN.format(state=state, restarts=restarts, ran=ran, limit=limit, preempt=preempt))


def test_facts_are_read_from_the_first_of_each_key() -> None:
    facts = shown()
    assert (facts.state, facts.restarts, facts.is_preempted, facts.is_batch) == ("RUNNING", 0, False, True)
    assert facts.time_left_s == 597
    assert shown(limit="UNLIMITED").time_left_s is None


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (shown(preempt="2026-11-21T05:42:25"), ExitCode.PREEMPTED),
        (shown(state="PREEMPTED"), ExitCode.PREEMPTED),
        (shown(state="COMPLETING", restarts=1), ExitCode.REQUEUED),
        (shown(state="PENDING", restarts=1), ExitCode.REQUEUED),
        (shown(state="COMPLETING", restarts=1, preempt="2026-11-21T05:42:25"), ExitCode.PREEMPTED),
        (shown(), ExitCode.STOPPED),
        (shown(ran="00:07:30"), ExitCode.TIME_LIMIT),  # 600 - 90 - 60: the signal may come a minute early
        (shown(ran="00:07:10"), ExitCode.STOPPED),
        (shown(state="COMPLETING", ran="00:10:01"), ExitCode.TIME_LIMIT),
        (shown(state="TIMEOUT", ran="00:10:01"), ExitCode.TIME_LIMIT),
        (shown(state="TIMEOUT", ran="00:03:00"), ExitCode.TIME_LIMIT),  # a reservation's end, or another limit
        (shown(state="NODE_FAIL"), ExitCode.NODE_FAILURE),
        (shown(state="COMPLETING"), ExitCode.CANCELLED),
        (shown(state="CANCELLED"), ExitCode.CANCELLED),
        (shown(state="COMPLETING", ran="00:09:50"), ExitCode.CANCELLED),  # near its time limit, too
        (shown(state="CANCELLED", ran="00:09:50"), ExitCode.CANCELLED),
        (shown(state="CANCELLED", preempt="2026-11-21T05:42:25"), ExitCode.CANCELLED),  # in its grace period
        (shown(state="COMPLETING", preempt="2026-11-21T05:42:25"), ExitCode.CANCELLED),
        (None, ExitCode.STOPPED),
    ],
)
def test_why_slurm_stopped_a_job(facts: JobInfo | None, cause: ExitCode) -> None:
    assert infer_stop_cause(JobFacts(SiteConfig(), facts)) == cause


def test_what_is_preempted_ends_without_being_put_back_where_the_site_cancels() -> None:
    facts = shown(state="COMPLETING", preempt="2026-11-21T05:42:25")
    assert infer_stop_cause(JobFacts(SiteConfig(requeue=False), facts)) == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("accounting", "preempted", "cause"),
    [
        ("Start2|PREEMPTED\nStart1|REQUEUED\nStart3|RUNNING\n", False, ExitCode.REQUEUED),
        ("Start2|REQUEUED\nStart1|PREEMPTED\n", False, ExitCode.PREEMPTED),
        ("Start1|NODE_FAIL\n", False, ExitCode.NODE_FAILURE),
        ("Start1|RUNNING\n", False, ExitCode.REQUEUED),  # it lags
        ("Start1|CANCELLED by 0\n", False, ExitCode.REQUEUED),  # the controller says that it is back in the queue
        ("Start1|RUNNING\n", True, ExitCode.PREEMPTED),
        (None, False, ExitCode.REQUEUED),
        (None, True, ExitCode.PREEMPTED),
    ],
)
@pytest.mark.parametrize("code", [ExitCode.STOPPED, ExitCode.CRASHED])
def test_a_requeue_that_somebody_asked_for_is_no_preemption(
    monkeypatch: pytest.MonkeyPatch, accounting: str | None, preempted: bool, cause: ExitCode, code: ExitCode
) -> None:
    monkeypatch.setattr(
        current_job, "run_slurm_command", lambda *words, **_: accounting if words[0] == "sacct" else None
    )
    info = shown(state="COMPLETING", restarts=1)
    state = current_job.query_accounted_state("12", "Start1")
    job = JobFacts(SiteConfig(), info, accounted_state=state, saw_preemption=preempted)
    found, said = determine_cause(code, job)
    assert found == cause and (said is None) == (code == ExitCode.STOPPED)
    assert get_budget_key(found) in ("preempted", "node_failure"), "a requeue is no crash"


@pytest.mark.parametrize(
    ("accounting", "state"),
    [
        ("CANCELLED by 0\n", "CANCELLED"),
        ("PREEMPTED\n", "PREEMPTED"),
        ("NODE_FAIL\n", "NODE_FAIL"),
        ("RUNNING\n", "COMPLETING"),
        (None, "COMPLETING"),
    ],
)
def test_accounting_tells_a_cancelled_job_from_a_preempted_one(
    monkeypatch: pytest.MonkeyPatch, accounting: str | None, state: str
) -> None:
    text = SHOWN.format(state="COMPLETING", restarts=0, ran="1", limit="1:00:00", preempt="2026-11-21T05:42:25")
    monkeypatch.setattr(
        current_job, "run_slurm_command", lambda *words, **_: text if words[0] == "scontrol" else accounting
    )
    facts = current_job.read_job_info("12")
    assert facts is not None and facts.state == state


def leave(
    run: Run, answers: list[JobInfo | None], monkeypatch: pytest.MonkeyPatch, signalled: bool = False
) -> tuple[ExitCode, list[str]]:
    """The end of a supervisor whose ranks ran out of memory, where Slurm then says these things of its job, in turn."""
    from slurm.supervise import supervisor

    asked: list[str] = []

    def requeue(*arguments: object) -> bool:
        asked.append("requeue")
        return True

    said, now = itertools.chain(answers, itertools.repeat(answers[-1])), itertools.count(step=5)
    monkeypatch.setattr(
        current_job, "run_slurm_command", lambda *words, **_: next(said) if words[0] == "scontrol" else None
    )
    monkeypatch.setattr(current_job, "parse_job_info", lambda facts: facts)
    monkeypatch.setattr(current_job, "requeue_job", requeue)
    monkeypatch.setattr(
        supervisor.succession.job_states, "run_slurm_command", lambda *words, **_: asked.append(words[0])
    )
    monkeypatch.setattr(supervisor.succession.job_states, "cluster_name", lambda: None)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    one = supervisor.Supervisor(run, "train", StopFlag())
    one.rank_info = make_rank_info(0, 1, 1)
    one.flag.reason = "SIGTERM" if signalled else None
    facts = StopFacts(
        cause=ExitCode.OUT_OF_MEMORY,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=run.config.recovery,
        is_batch=True,
        was_signalled=signalled,
        job=JobFacts(run.config.site),
    )
    code = one._exit_for_retry(supervisor.AttemptEnd(ExitCode.OUT_OF_MEMORY, fields={"message": "rank 1"}), facts)
    return code, asked


def test_what_was_cancelled_after_its_cause_was_told_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    assert leave(run, [None, None, shown(state="COMPLETING")], monkeypatch) == (ExitCode.CANCELLED, [])
    assert read_event_lines(run, "train")[-1]["event"] == "cancelled"
    found = leave(run, [None], monkeypatch, signalled=True)
    assert found == (ExitCode.OUT_OF_MEMORY, []), "a blind requeue may revive a cancelled job"
    assert "did not report" in read_event_lines(run, "train")[-1]["message"]
    assert leave(run, [None], monkeypatch) == (ExitCode.OUT_OF_MEMORY, ["requeue"]), "a cancelled one had got a signal"
    assert leave(run, [None, shown()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, ["requeue"])
    assert read_event_lines(run, "train")[-1]["event"] == "requeued"


def test_a_job_that_is_not_put_back_sees_to_a_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm.submit import sbatch
    from slurm.supervise import supervisor

    run = Run.create(load_config(write_config(tmp_path), ["site.requeue=false"]))
    submitted: list[object] = []
    ended: list[bool] = []

    def submit(run: Run, stage: str, after: Sequence[str], *, kind: str, **more: object) -> None:
        submitted.append(stage)
        if len(submitted) == 1:
            raise UserError("sbatch refused the job")
        write_event(run, "submitted", stage, job_id="8", after=list(after), kind=kind)

    monkeypatch.setattr(sbatch, "submit_stage", submit)
    monkeypatch.setattr(supervisor.Supervisor, "cancel_unneeded_jobs", lambda self, is_done: ended.append(is_done))
    assert leave(run, [shown()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, [])
    told = read_event_lines(run, "train")[-1]
    assert told["event"] == "failed" and "no successor" in told["message"] and ended == [False]
    for _ in range(2):
        assert leave(run, [shown()], monkeypatch) == (ExitCode.OUT_OF_MEMORY, [])
        assert read_event_lines(run, "train")[-1]["event"] == "handed_over"
    assert len(submitted) == 2 and ended == [False], "one is enough"


@pytest.mark.parametrize(
    ("state", "told", "goes_on"),
    [
        ("CANCELLED", "time_limit", False), ("TIMEOUT", "cancelled", True), ("NODE_FAIL", None, True),
        (UNKNOWN, "cancelled", False), (UNKNOWN, "preempted", True), (UNKNOWN, None, True),
    ],
)  # fmt: skip
def test_a_cancelled_job_has_no_successor_even_when_slurm_has_forgotten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, told: str | None, goes_on: bool
) -> None:
    from slurm.submit import sbatch
    from slurm.supervise import succession

    run = Run.create(load_config(write_config(tmp_path)))
    write_event(run, "submitted", "train", job_id="7", executor="slurm", after=["6"], kind="afternotok")
    write_event(run, "started", "train", job_id="6", slurm_job="6", attempt=1)
    if told:
        write_event(run, "stopping", "train", job_id="6", by="SIGTERM", cause=told)
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: JobState(job.job_id, state) for job in jobs}
    )
    monkeypatch.setattr(succession.job_states, "run_slurm_command", lambda *words, **_: "")
    monkeypatch.setattr(sbatch, "submit_stage", lambda *words, **more: "8")
    reason = succession.take_over(run, "train", replace(make_rank_info(0, 1, 1), job_id="7"))
    assert (reason is None) == goes_on and (
        "took_over" in [e["event"] for e in read_event_lines(run, "train")]
    ) == goes_on


CAUSES = [
    ExitCode.PREEMPTED,
    ExitCode.REQUEUED,
    ExitCode.NODE_FAILURE,
    ExitCode.TIME_LIMIT,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.CRASHED,
    ExitCode.HANG,
]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(CAUSES), st.booleans()), max_size=60),
    st.integers(1, 4), st.integers(0, 4), st.integers(0, 9),
)  # fmt: skip
def test_a_stage_goes_on_within_its_budgets_and_never_loops(
    stops: list[tuple[ExitCode, bool]], fruitless: int, small: int, large: int
) -> None:
    """Against a plain count: what went on so far, by budget, and how many fruitless attempts stand in a row."""
    budgets = RetryBudgets(
        preempted=large, node_failure=large, time_limit=large, out_of_memory=small, crash=small, hang=small
    )
    limits = RecoveryConfig(budgets=budgets, max_restarts_without_progress=fruitless)
    events: list[dict[str, Any]] = []
    used: dict[str, int] = {}
    row = 0
    for cause, progress in stops:
        key = get_budget_key(cause)
        row = 0 if progress else row + 1
        blameless = cause in (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.NODE_FAILURE)
        may = used.get(key, 0) < getattr(limits.budgets, key) and (progress or (blameless and row <= fruitless))
        assert (explain_no_retry(read_stage_state(parse_events(events)), cause, progress, limits) is None) == may
        events.append({"event": "failed", "cause": cause.name.lower()})
        if not may:
            break
        used[key] = used.get(key, 0) + 1
        events.append({"event": "requeued", "budget": key, "progress": progress})


def test_every_failure_has_a_budget() -> None:
    for code in ExitCode:
        assert isinstance(getattr(RetryBudgets(), get_budget_key(code)), int)
    assert explain_no_retry(StageState(), ExitCode.STORAGE, True, RecoveryConfig()) == "", "a person has to mend it"
    assert explain_no_retry(StageState(), ExitCode.PREEMPTED, False, RecoveryConfig()) is None
    begun = read_stage_state([make_event("started")])
    words = explain_no_retry(begun, ExitCode.TIME_LIMIT, False, RecoveryConfig()) or ""
    assert "no new checkpoint" in words
    assert "loop. It takes longer to start and to save than stages.train.time allows" in words
    begun = read_stage_state([make_event("started", "publish")])
    assert "brought nothing new" in (explain_no_retry(begun, ExitCode.CRASHED, False, RecoveryConfig()) or "")


def test_an_advance_is_a_new_step_a_repaired_one_or_a_decision(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path, "tiny", 20)))
    seen = [read_progress_marker(run, "train")]

    def tell(event: str, step: int) -> bool:
        """Whether the event is an advance."""
        write_event(run, event, "train", step=step)
        seen.append(read_progress_marker(run, "train"))
        return seen[-1] != seen[-2]

    assert tell("saved", 4) and tell("saved", 8)
    assert not tell("saved", 8) and not tell("saved", 4), "what was saved before is nothing new"
    assert not tell("damaged", 8) and tell("saved", 8), "in the place of a damaged one"
    assert not tell("saved", 8)
    (run.checkpoints_dir / checkpoint_name(12)).mkdir()
    seen.append(read_progress_marker(run, "train"))
    assert seen[-1] != seen[-2], "a checkpoint whose event was not written any more"
    append_line(run.decisions_file, "{}")
    assert read_progress_marker(run, "train") != seen[-1]


def test_the_first_rank_that_failed_by_itself_is_blamed() -> None:
    lost, full, killed = (
        f"srun: error: n{n}: task {n}: {words}\n"
        for n, words in [(1, "Exited with exit code 76"), (0, "Exited with exit code 21"), (2, "Killed")]
    )
    assert SrunLauncher.find_first_failure(lost + full + killed, 76) == RankExit(0, 21, "n0")
    assert SrunLauncher.find_first_failure(lost + killed, 76) == RankExit(2, -9, "n2")
    assert SrunLauncher.find_first_failure(lost, 76) == RankExit(1, 76, "n1")
    assert SrunLauncher.find_first_failure("nothing", 1) is None


SAMPLES = {
    "SRUN_TASK": "srun: error: n1: tasks 0-1: Exited with exit code 20",
    "SRUN_EXITED": "Exited with exit code 20",
    "SRUN_OUT_OF_MEMORY": "Out Of Memory",
    "STEPD_OUT_OF_MEMORY": "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
    "SRUN_ERROR": "srun: error: Invalid MPI type 'nosuch', --mpi=list for acceptable types",
    "SBATCH_NO_REPLY": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "SBATCH_ERROR": "sbatch: error: invalid partition specified: nosuch",
    "CONTROLLER_UP": "Slurmctld(primary) at control is UP",
    "CONTROLLER_DOWN": "Slurmctld(primary) at control is DOWN",
    "NO_SUCH_JOB": "slurm_load_jobs error: Invalid job id specified",
    "DEPENDENCY_NEVER_SATISFIED": "DependencyNeverSatisfied",
    "JOB_HELD": "JobHeldUser",
    "MPIRUN_KILLED": "prterun noticed that process rank 1 with PID 271 on node n2 exited on\nsignal 9 (Killed).",
    "MPIRUN_EXITED": "   Process name: [prterun-vm-27247@1,1]\n   Exit code:    3\n",
    "HYDRA_EXITED": "=   PID 27247 RUNNING AT n1\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n",
}


def test_each_pattern_has_its_version_and_finds_what_was_said() -> None:
    rows = {name: row for name, row in vars(slurm_messages).items() if isinstance(row, re.Pattern)}
    assert rows.keys() == SAMPLES.keys() and all(row.search(SAMPLES[name]) for name, row in rows.items())
    said = re.findall(
        r"^([A-Z_]+) = re.*\n\"{3}([^\"]*)\"{3}$", Path(slurm_messages.__file__).read_text(), re.MULTILINE
    )
    seen = r"Seen: ((Slurm|Open MPI|MPICH) \d+\.\d+.*|Slurm's documentation only)\.$"
    assert dict(said).keys() == rows.keys() and all(re.search(seen, text) for _, text in said)


@pytest.mark.parametrize("target", ["own", "own.net"])
def test_a_bug_in_ones_own_module_is_shown_by_its_own_frames(tmp_path: Path, target: str) -> None:
    """The log has the others. A bug elsewhere keeps all."""
    config = load_config(write_config(tmp_path))
    model = config.model.model_copy(update={"target": target})
    run = Run(tmp_path / "run", config.model_copy(update={"model": model}))
    run.stage_dir("train").mkdir(parents=True, exist_ok=True)
    frames = [
        f'  File "{run.code_dir}/{name}", line 7, in forward\n    y = self.layer(x)\n        ^^^^^^^^^^^^^\n'
        for name in ("pipeline/train/engine.py", "owner.py", f"{target.replace('.', '/')}.py", "/torch/nn/linear.py")
    ]
    head, tail = "Traceback (most recent call last):\n", "RuntimeError: mat1 and mat2\n  with shapes (1x3 and 64x64)\n"
    write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.CRASHED, "".join([head, *frames, tail]))
    message = find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)]).fields["message"]
    assert message.partition("\n")[2] == head + frames[2] + tail
    write_error_report(run, "train", make_rank_info(0, 2, 1), ExitCode.CRASHED, "".join([head, *frames[:2], tail]))
    message = find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)]).fields["message"]
    assert message.partition("\n")[2] == head + "".join(frames[:2]) + tail


def test_slurms_words_stand_in_one_table() -> None:
    """Nobody else looks for what they say."""
    said = (r"exit code (\d", "Out Of Memory", "oom[-_", "sbatch: error", " is UP", " is DOWN", 'Satisfied"', " PID ")
    found = {path.name for path in (CODE_ROOT / "slurm").rglob("*.py") if any(w in path.read_text() for w in said)}
    assert found == {"slurm_messages.py"}


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
def test_out_of_memory_as_slurm_tells_it(tmp_path: Path, messages: str) -> None:
    left = SrunLauncher.find_first_failure("srun: error: n0: task 0: Exited with exit code 76\n" + messages, 137)
    assert left == RankExit(1, ExitCode.OUT_OF_MEMORY, "n1")
    run = Run.create(load_config(write_config(tmp_path)))
    for rank, code in ((0, ExitCode.CRASHED), (2, ExitCode.PEER_LOST)):  # what the peers made of it
        write_error_report(run, "train", make_rank_info(rank, 3, 1), code, "lost it")
    failure = find_failure(run, "train", [left])
    assert (failure.cause, failure.fields["rank"], failure.fields["host"]) == (ExitCode.OUT_OF_MEMORY, 1, "n1")
    write_error_report(run, "train", make_rank_info(1, 3, 1), ExitCode.OUT_OF_MEMORY, "CUDA out of memory")
    assert find_failure(run, "train", [RankExit(0, ExitCode.CRASHED)]).fields["rank"] == 0, "the earliest report"


ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (ECC, ExitCode.BAD_NODE),
        ("NCCL error: unhandled cuda error\nCuda failure 220 'uncorrectable NVLink error detected'", ExitCode.BAD_NODE),
        ("Unable to determine the device handle for GPU 0000:0B:00.0: GPU is lost.", ExitCode.BAD_NODE),
        ("NVRM: Xid (PCI:0000:0b:00): 79, pid=9, GPU has fallen off the bus.", ExitCode.BAD_NODE),
        ("NVRM: Xid (PCI:0000:0b:00): 31, pid=9, MMU Fault", ExitCode.CRASHED),
        ("CUDA error: an illegal memory access was encountered", ExitCode.CRASHED),
        ("CUDA error: device-side assert triggered", ExitCode.CRASHED),
    ],
)
def test_a_gpu_that_fails_is_its_nodes_fault(words: str, code: ExitCode) -> None:
    assert explain_error(RuntimeError(words))[0] == code


def test_a_gpu_that_fails_shows_in_the_log_where_nccl_aborts(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    logs = [get_rank_log(run, "train", rank) for rank in range(3)]
    for log in logs:
        log.write_text(f"what(): {ECC}, in an attempt before\n")
    begins = measure_log_sizes(run, "train")
    aborted = [RankExit(0, -6), RankExit(1, -6, "n2")]
    assert find_failure(run, "train", aborted, log_sizes=begins).cause == ExitCode.CRASHED
    with open(logs[1], "a") as more:
        more.write(f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {ECC}\n")
    write_error_report(run, "train", make_rank_info(2, 3, 1), ExitCode.PEER_LOST, "lost it")
    failure = find_failure(run, "train", aborted, log_sizes=begins)
    assert failure.cause == ExitCode.BAD_NODE
    assert failure.fields == {"rank": 1, "host": "n2", "message": f"rank 1 on n2:\nwhat():  {ECC}"}
    assert find_failure(run, "train", [RankExit(1, -9, "n2")], log_sizes=begins).cause == ExitCode.CRASHED, (
        "killed by somebody"
    )


def test_a_full_disk_shows_even_where_no_rank_could_say_so(small_disk: Path) -> None:
    run = Run.create(load_config(write_config(small_disk, "tiny", 20)))
    assert run.describe_write_error() is None
    with open(small_disk / "filler", "wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    assert "no space is left" in (run.describe_write_error() or "")
    assert not list(run.path.glob(".probe*"))


def test_nodes_that_are_away_or_were(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f"NodeName={name} Arch=x86_64 State={state} ThreadsPerCore=1 BootTime=None SlurmdStartTime={up}"
        for name, state, up in [
            ("n1", "MIXED", "2026-11-20T09:00:00"),
            ("n2", "DOWN*", "2026-11-20T09:00:00"),
            ("n3", "IDLE", "2026-11-21T10:00:05"),
            ("n4", "ALLOCATED*", "None"),
            ("n5", "IDLE+NOT_RESPONDING", "Unknown"),
        ]
    ]
    monkeypatch.setattr(current_job, "run_slurm_command", lambda *words, **_: "\n".join(lines))
    assert find_failed_nodes("n[1-5]") == ["n2", "n4", "n5"]
    assert find_failed_nodes("n[1-5]", "2026-11-21T10:00:00") == ["n2", "n3", "n4", "n5"]
    assert find_failed_nodes("") == []


@pytest.mark.parametrize(("shown_restarts", "believed"), [(3, True), (2, False), (None, False)])
def test_a_requeue_that_kills_its_own_scontrol_has_worked(
    monkeypatch: pytest.MonkeyPatch, shown_restarts: int | None, believed: bool
) -> None:
    def call(*words: str) -> str | None:
        if words[:2] == ("scontrol", "requeue") or shown_restarts is None:
            return None
        return SHOWN.format(state="COMPLETING", restarts=shown_restarts, ran="1", limit="1:00:00", preempt="None")

    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(current_job, "run_slurm_command", call)
    monkeypatch.setattr(current_job.time, "sleep", sleep)
    monkeypatch.setattr(current_job.time, "monotonic", lambda: now)
    assert current_job.requeue_job("12", 2) == believed


# -- supervisors that died -----------------------------------------------------------------------------------


def silent(folder: Path, *told: tuple[str, dict[str, Any]], overrides: Sequence[str] = ()) -> Run:
    """A run whose attempt in job 6 began and saved nothing, with the successor 7 behind it, and these events since."""
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
    for event, more in told:
        write_event(run, event, "train", job_id="6", **more)
    return run


def close(run: Run, job_id: str, restarts: int = 0) -> tuple[ExitCode | None, str | None, list[dict[str, Any]]]:
    """What a supervisor in that job finds, and writes."""
    before = len(read_event_lines(run, "train"))
    refused = close_open_attempt(
        run, "train", replace(make_rank_info(0, 1, 1), job_id=job_id, restart_count=restarts), None
    )
    return *(refused or (None, None)), read_event_lines(run, "train")[before:]


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def say(state: str) -> None:
        monkeypatch.setattr(attempt_end, "read_job_info", lambda job: None)
        monkeypatch.setattr(
            attempt_end, "query_job_states", lambda jobs: {job: JobState(job.job_id, state) for job in jobs}
        )

    return say


@pytest.mark.parametrize(
    ("state", "told", "cause", "ends", "goes_on"),
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
def test_a_successor_keeps_to_the_budgets_of_a_supervisor_that_died(
    tmp_path: Path, slurm_says: Callable[[str], None], state: str, told: dict[str, str] | None, cause: str,
    ends: str, goes_on: bool,
) -> None:  # fmt: skip
    """No new checkpoint: what is nobody's fault may go on some times, anything else may not."""
    slurm_says(state)
    run = silent(tmp_path, *([("stopping", told)] if told else []))
    code, _, events = close(run, "7")
    assert (code is None) == goes_on and [e["event"] for e in events] == [ends, *["handed_over"] * goes_on]
    assert {e["cause"] for e in events} == {cause} and code in (
        None,
        ExitCode.__members__.get(cause.upper(), ExitCode.STOPPED),
    )
    again = close(run, "7")
    assert again[2] == [] and again[0] == code, "it says the same when it is asked again"


def test_caps_hold_for_supervisors_that_die_again_and_again(tmp_path: Path, slurm_says: Callable[[str], None]) -> None:
    slurm_says("NODE_FAIL")
    run, job = silent(tmp_path, overrides=["recovery.fruitless=2"]), 7
    while (found := close(run, str(job)))[0] is None:
        write_event(run, "submitted", "train", job_id=str(job + 1), after=[str(job)], kind="afternotok")
        here = {"job_id": str(job), "slurm_job": str(job), "standing": read_progress_marker(run, "train")}
        write_event(run, "started", "train", attempt=job - 5, restarts=0, **here)
        job += 1
        assert job < 20, "it loops"
    assert job == 9 and "3 attempts in a row" in (found[1] or "") and found[2][-1]["event"] == "failed"
    write_event(run, "resumed")
    assert close(run, str(job))[0] is None, "a person said go on"


def test_the_same_job_again_keeps_to_the_budgets(tmp_path: Path) -> None:
    run = silent(tmp_path, overrides=["recovery.node_failure=1"])
    assert [e["event"] for e in close(run, "6", 1)[2]] == ["failed", "requeued"]
    write_event(run, "started", "train", job_id="6", slurm_job="6", attempt=2, restarts=1, standing="step 0")
    code, reason, events = close(run, "6", 2)
    assert code == ExitCode.NODE_FAILURE and "recovery.budgets.node_failure: 1" in str(reason)
    assert "not tried again" in events[-1]["message"] and len(events) == 1


def test_a_budget_is_charged_where_the_supervisor_died_before_it_could(tmp_path: Path) -> None:
    run = silent(tmp_path, ("preempted", {"cause": "preempted", "exit_code": 71}))
    assert [(e["event"], e.get("budget")) for e in close(run, "6", 1)[2]] == [("requeued", "preempted")]
    assert close(run, "6", 1)[2] == []
    final = silent(tmp_path / "final", ("failed", {"cause": "crashed", "exit_code": 1}))
    assert close(final, "6", 1)[:2] == (None, None), "a person put a job back that had failed for good"
    assert close(final, "7")[0] == ExitCode.CRASHED, "but no successor goes on with it"
    assert close(silent(tmp_path / "hand"), "99")[0] is None, "a person started another job"


def test_a_point_of_a_sweep_has_its_attempts_closed_though_it_is_a_task_of_an_array(tmp_path: Path) -> None:
    run = silent(tmp_path)
    close_open_attempt(run, "train", replace(make_rank_info(0, 1, 1), job_id="6", restart_count=1, array=(3, 4)), None)
    assert [e["event"] for e in read_event_lines(run, "train")[-2:]] == ["failed", "requeued"]


def test_a_takeover_that_was_refused_does_not_stand_in_the_way_of_a_resume(
    tmp_path: Path, slurm_says: Callable[[str], None]
) -> None:
    slurm_says("CANCELLED")
    run = silent(tmp_path, ("cancelled", {"cause": "cancelled", "exit_code": 74, "message": "job 5"}))
    assert close(run, "9") == (None, None, [])


def facts(state: str = "RUNNING", restarts: int = 0, **more: Any) -> JobInfo:
    return JobInfo(state, restarts, more.pop("preempted", False), more.pop("left_s", 600.0), True, **more)


@pytest.mark.parametrize(
    ("seen", "requeue", "signalled", "way"),
    [
        (facts(), True, False, NextAction.REQUEUE),  # a crash, a hang: it asks
        (facts(), True, True, NextAction.REQUEUE),
        (facts(restarts=1), True, True, NextAction.AWAIT_REQUEUE),
        (facts(restarts=1), False, True, NextAction.AWAIT_REQUEUE),
        (facts(), False, True, NextAction.HAND_OVER),
        (facts("COMPLETING"), False, True, NextAction.HAND_OVER),  # it sees how its predecessor ended
        (None, False, True, NextAction.HAND_OVER),
        (facts("CANCELLED"), False, True, NextAction.CANCEL),
        (facts("CANCELLED"), True, True, NextAction.CANCEL),
        (facts("COMPLETING"), True, True, NextAction.CANCEL),
        (facts("COMPLETING", left_s=0.0), True, True, NextAction.REQUEUE),
        (None, True, True, NextAction.QUERY_JOB),  # a job that is cancelled gets a signal
        (None, True, False, NextAction.REQUEUE),
        (facts(preempted=True, may_requeue=True), True, True, NextAction.EXIT),
        (facts(preempted=True, may_requeue=True, restarts=1), True, True, NextAction.AWAIT_REQUEUE),
        (facts(preempted=True, may_requeue=True), False, True, NextAction.HAND_OVER),
    ],
)
def test_how_a_job_leaves_that_is_to_go_on(
    seen: JobInfo | None, requeue: bool, signalled: bool, way: NextAction
) -> None:
    site = SiteConfig(requeue=requeue)
    facts = StopFacts(
        cause=ExitCode.PREEMPTED,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=RecoveryConfig(),
        is_batch=True,
        was_signalled=signalled,
        job=JobFacts(site, seen, is_requeued_on_exit=seen is not None and seen.is_preempted),
    )
    assert choose_next_action(facts).action == way
