"""Test the parsing of what Slurm and CUDA report about a stop, and the budgets that limit retries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode
from pipeline.config.sections import RecoveryConfig, RetryBudgets
from pipeline.run.attempts import explain_no_retry, get_budget_key
from pipeline.run.code import CODE_ROOT
from pipeline.run.events import StageState, read_stage_state
from pipeline.run.failure import explain_error
from slurm.query import current_job, slurm_commands
from slurm.query.current_job import JobInfo, find_failed_nodes, parse_job_info
from tests.support.events import make_event, parse_events

# the output of `scontrol show job` of Slurm 22.05; the comment contains text that looks like other fields
JOB_OUTPUT = """JobId=1 JobName=j.sh
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime={run_time} TimeLimit={limit} TimeMin=N/A
   StartTime=2026-11-21T05:42:23 EndTime=2026-11-21T05:42:30 Deadline=N/A
   PreemptEligibleTime=2026-11-21T05:42:23 PreemptTime={preempt}
   NodeList=n[1-4]
   Comment=sluice PreemptTime=2026-01-01T00:00:00 JobState=CANCELLED Restarts=7
"""


def format_job(
    state: str = "RUNNING",
    restarts: int = 0,
    run_time: str = "00:00:03",
    limit: str = "00:10:00",
    preempt: str = "None",
) -> str:
    """Return the output of `scontrol show job` for a job with these fields."""
    return JOB_OUTPUT.format(state=state, restarts=restarts, run_time=run_time, limit=limit, preempt=preempt)


def make_job_info(**fields: Any) -> JobInfo:
    """Return the JobInfo of a job with these fields (see `format_job`)."""
    return parse_job_info(format_job(**fields))


def test_the_first_value_of_each_key_is_read() -> None:
    """The last field, the comment, contains some of the keys again. They must be ignored."""
    info = make_job_info()
    assert (info.state, info.restarts, info.is_preempted, info.is_batch) == ("RUNNING", 0, False, True)
    assert info.time_left_s == 597
    assert make_job_info(limit="UNLIMITED").time_left_s is None


@pytest.mark.parametrize(
    ("sacct_output", "state"),
    [
        ("CANCELLED by 0\n", "CANCELLED"),
        ("PREEMPTED\n", "PREEMPTED"),
        ("NODE_FAIL\n", "NODE_FAIL"),
        ("RUNNING\n", "COMPLETING"),
        (None, "COMPLETING"),
    ],
)
def test_the_state_of_a_completing_job_is_read_from_accounting(
    monkeypatch: pytest.MonkeyPatch, sacct_output: str | None, state: str
) -> None:
    job = format_job(state="COMPLETING", run_time="1", limit="1:00:00", preempt="2026-11-21T05:42:25")
    monkeypatch.setattr(
        current_job, "run_slurm_command", lambda *command, **_: job if command[0] == "scontrol" else sacct_output
    )
    info = current_job.read_job_info("12")
    assert info is not None and info.state == state


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
def test_a_stage_is_retried_within_its_budgets_and_only_with_progress(
    stops: list[tuple[ExitCode, bool]], max_without_progress: int, small: int, large: int
) -> None:
    """`stops` has the cause of the end of each attempt, and whether the attempt made progress.

    The test counts the used retries of each budget and the attempts without progress, and expects the same decision.
    `small` and `large` are budgets.
    """
    budgets = RetryBudgets(
        preempted=large, node_failure=large, time_limit=large, out_of_memory=small, crash=small, hang=small
    )
    limits = RecoveryConfig(budgets=budgets, max_restarts_without_progress=max_without_progress)
    events: list[dict[str, Any]] = []
    used: dict[str, int] = {}
    without_progress = 0
    for cause, has_progress in stops:
        key = get_budget_key(cause)
        without_progress = 0 if has_progress else without_progress + 1
        is_caused_by_slurm = cause in (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.NODE_FAILURE)
        may_lack_progress = is_caused_by_slurm and without_progress <= max_without_progress
        is_retried = used.get(key, 0) < getattr(limits.budgets, key) and (has_progress or may_lack_progress)
        state = read_stage_state(parse_events(events))
        assert (explain_no_retry(state, cause, has_progress, limits) is None) == is_retried
        events.append({"event": "failed", "cause": cause.name.lower()})
        if not is_retried:
            break
        used[key] = used.get(key, 0) + 1
        events.append({"event": "requeued", "budget": key, "progress": has_progress})


def test_every_exit_code_has_a_budget() -> None:
    for code in ExitCode:
        assert isinstance(getattr(RetryBudgets(), get_budget_key(code)), int)


def test_the_reason_against_a_retry_names_the_missing_progress() -> None:
    """`explain_no_retry` returns None if the stage is retried, and "" if the budget of the cause is 0."""
    limits = RecoveryConfig()
    assert explain_no_retry(StageState(), ExitCode.STORAGE, has_progress=True, limits=limits) == "", (
        "the stage must not be retried, because only a user can repair the storage"
    )
    assert explain_no_retry(StageState(), ExitCode.PREEMPTED, has_progress=False, limits=limits) is None
    state = read_stage_state([make_event("started")])
    reason = explain_no_retry(state, ExitCode.TIME_LIMIT, has_progress=False, limits=limits) or ""
    assert "nothing new" in reason and "stages.train.time" in reason
    state = read_stage_state([make_event("started", "publish")])
    reason = explain_no_retry(state, ExitCode.CRASHED, has_progress=False, limits=limits) or ""
    assert "nothing new" in reason and "stages." not in reason


SAMPLE_MESSAGES = {
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


def test_each_message_pattern_matches_its_sample_and_names_the_versions() -> None:
    patterns = {name: value for name, value in vars(slurm_commands).items() if isinstance(value, re.Pattern)}
    assert patterns.keys() == SAMPLE_MESSAGES.keys()
    assert all(pattern.search(SAMPLE_MESSAGES[name]) for name, pattern in patterns.items())
    source = Path(slurm_commands.__file__).read_text()
    docstrings = dict(re.findall(r"^([A-Z_]+) = re.*\n\"{3}([^\"]*)\"{3}$", source, re.MULTILINE))
    versions = r"Seen: ((Slurm|Open MPI|MPICH) \d+\.\d+.*|Slurm's documentation only)\.$"
    assert docstrings.keys() == patterns.keys()
    assert all(re.search(versions, docstring) for docstring in docstrings.values())


def test_only_slurm_commands_py_contains_messages_of_slurm() -> None:
    texts = (r"exit code (\d", "Out Of Memory", "oom[-_", "sbatch: error", " is UP", " is DOWN", 'Satisfied"', " PID ")
    files = (CODE_ROOT / "slurm").rglob("*.py")
    assert {file.name for file in files if any(text in file.read_text() for text in texts)} == {"slurm_commands.py"}


ECC_ERROR = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ECC_ERROR, ExitCode.BAD_NODE),
        ("NCCL error: unhandled cuda error\nCuda failure 220 'uncorrectable NVLink error detected'", ExitCode.BAD_NODE),
        ("Unable to determine the device handle for GPU 0000:0B:00.0: GPU is lost.", ExitCode.BAD_NODE),
        ("NVRM: Xid (PCI:0000:0b:00): 79, pid=9, GPU has fallen off the bus.", ExitCode.BAD_NODE),
        ("NVRM: Xid (PCI:0000:0b:00): 31, pid=9, MMU Fault", ExitCode.CRASHED),
        ("CUDA error: an illegal memory access was encountered", ExitCode.CRASHED),
        ("CUDA error: device-side assert triggered", ExitCode.CRASHED),
    ],
)
def test_an_error_of_gpu_hardware_counts_as_a_bad_node(message: str, code: ExitCode) -> None:
    """Xid 79 is an error of the hardware. Xid 31 and the last two errors can be caused by a bug in a program."""
    assert explain_error(RuntimeError(message))[0] == code


def test_failed_nodes_are_down_or_have_restarted_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call names the start time of the job. The slurmd of n3 has started 5 s after it."""
    lines = [
        f"NodeName={name} Arch=x86_64 State={state} ThreadsPerCore=1 BootTime=None SlurmdStartTime={slurmd_start}"
        for name, state, slurmd_start in [
            ("n1", "MIXED", "2026-11-20T09:00:00"),
            ("n2", "DOWN*", "2026-11-20T09:00:00"),
            ("n3", "IDLE", "2026-11-21T10:00:05"),
            ("n4", "ALLOCATED*", "None"),
            ("n5", "IDLE+NOT_RESPONDING", "Unknown"),
        ]
    ]
    monkeypatch.setattr(current_job, "run_slurm_command", lambda *command, **_: "\n".join(lines))
    assert find_failed_nodes("n[1-5]") == ["n2", "n4", "n5"]
    assert find_failed_nodes("n[1-5]", "2026-11-21T10:00:00") == ["n2", "n3", "n4", "n5"]
    assert find_failed_nodes("") == []


@pytest.mark.parametrize(("restarts", "was_requeued"), [(3, True), (2, False), (None, False)])
def test_a_requeue_counts_as_successful_if_the_job_has_one_restart_more(
    monkeypatch: pytest.MonkeyPatch, restarts: int | None, was_requeued: bool
) -> None:
    """`scontrol requeue` fails here, because the requeue may kill scontrol before it reports success.

    The job had 2 restarts before. `restarts` None: the controller does not respond.
    """

    def run_command(*command: str) -> str | None:
        if command[:2] == ("scontrol", "requeue") or restarts is None:
            return None
        return format_job(state="COMPLETING", restarts=restarts, run_time="1", limit="1:00:00")

    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(current_job, "run_slurm_command", run_command)
    monkeypatch.setattr(current_job.time, "sleep", sleep)
    monkeypatch.setattr(current_job.time, "monotonic", lambda: now)
    assert current_job.requeue_job("12", 2) == was_requeued
