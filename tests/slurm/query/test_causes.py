"""Causes and budgets: what Slurm says of a job, what it is charged to, and when a stage may not go on by itself."""

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
    rows = {name: row for name, row in vars(slurm_commands).items() if isinstance(row, re.Pattern)}
    assert rows.keys() == SAMPLES.keys() and all(row.search(SAMPLES[name]) for name, row in rows.items())
    said = re.findall(
        r"^([A-Z_]+) = re.*\n\"{3}([^\"]*)\"{3}$", Path(slurm_commands.__file__).read_text(), re.MULTILINE
    )
    seen = r"Seen: ((Slurm|Open MPI|MPICH) \d+\.\d+.*|Slurm's documentation only)\.$"
    assert dict(said).keys() == rows.keys() and all(re.search(seen, text) for _, text in said)


def test_slurms_words_stand_in_one_table() -> None:
    """Nobody else looks for what they say."""
    said = (r"exit code (\d", "Out Of Memory", "oom[-_", "sbatch: error", " is UP", " is DOWN", 'Satisfied"', " PID ")
    found = {path.name for path in (CODE_ROOT / "slurm").rglob("*.py") if any(w in path.read_text() for w in said)}
    assert found == {"slurm_commands.py"}


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
