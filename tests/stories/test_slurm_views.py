"""Test `status`, `logs` and `report` on a real Slurm with accounting, and runs without submit.py."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob, query_job_states
from slurm.query.run_jobs import list_recorded_jobs
from slurm.query.slurm_commands import NOT_RESPONDING
from slurm.query.status import StatusPoller
from slurm.supervise.launch import SrunLauncher
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.cluster.machines import Machine
from tests.stories.test_local_runs import Terminal
from tests.support.cluster_runs import get_job_id, list_event_names, run_submit, submit_template, wait_for
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.tiny import compute_run_digest, slow_down_steps, write_config
from tracking.report import read_report_data

cluster = cluster_fixture(grace=5, accounting=True, min_job_age=2)

pytestmark = pytest.mark.timeout(900)
NODES = ("stages.train.nodes=2", "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1")


@pytest.fixture(autouse=True)
def use_test_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the environment of this process so that its Slurm commands use the test cluster."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an undisturbed run `runs/tiny` on two nodes and return the folder.

    The file `pending` in it contains the errors of `logs` while the train job was pending.
    """
    folder = tmp_path_factory.mktemp("reference")
    write_config(folder, steps=20)
    assert run_submit(cluster, folder, "tiny.yaml", *NODES).returncode == 0
    (folder / "pending").write_text(run_submit(cluster, folder, "logs", "runs/tiny", "train").stderr)
    wait_for("the end", lambda: "done" in list_event_names(folder / "runs/tiny", "evaluate"))
    return folder


def create_run(folder: Path, reference: Path, name: str, *overrides: str, is_slow: bool = False) -> Path:
    """Create a run with the config and a copy of the data of the reference run. Return its path.

    Args:
        folder: folder for the config and `runs`.
        reference: result of the fixture `reference`.
        name: name of the new run.
        overrides: further overrides of config keys.
        is_slow: add half a second to each step.
    """
    text = (reference / "tiny.yaml").read_text().replace("name: tiny", f"name: {name}")
    (folder / f"{name}.yaml").write_text(text.replace(f"root: {reference}", f"root: {folder}"))
    run = Run.create(load_config(folder / f"{name}.yaml", [*NODES, *overrides]))
    run.data_dir.rmdir()
    subprocess.run(["cp", "-r", str(reference / "runs/tiny/data"), str(run.data_dir)], check=True, timeout=240)
    if is_slow:
        slow_down_steps(run)
    return run.path


def replace_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    """Replace Slurm commands by shell scripts. `lines` has the name of each command and the line of its script."""
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_job_states_are_read_from_squeue_and_sacct_or_derived_from_the_run(
    reference: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue shows a held job, accounting shows the finished jobs, and another job ID is unknown.

    Then sacct fails, and squeue finds only the held job. `status` must still report the stages as done, because their
    outputs are complete.
    """
    jobs = [job for _, job in list_recorded_jobs(Run.open(reference / "runs/tiny"))]
    options = ["--hold", "--array=0-1", "--wrap", "true", f"--chdir={tmp_path}", "--comment=sluice x"]
    held_job = RecordedJob(cluster.output(["sbatch", "--parsable", *options]), ("sluice x",))
    unknown_job = RecordedJob("99999", ("sluice x",))
    ids = {job.job_id for job in jobs}
    list_ids = ["squeue", "-h", "-t", "all", "-o", "%A"]
    wait_for("squeue to forget the jobs", lambda: ids.isdisjoint(cluster.output(list_ids).split()), 60)
    final_states: dict[RecordedJob, JobState] = {}
    states = query_job_states([*jobs, held_job, unknown_job], final_states)
    assert set(final_states) == {*jobs, unknown_job}, "final states must be cached"
    assert {states[job].state for job in jobs} == {"COMPLETED"}
    assert states[held_job].state == "PENDING" and states[unknown_job].state == UNKNOWN
    # squeue fails if it is called with a single ID and does not know it
    unknown_state = query_job_states([unknown_job])[unknown_job]
    assert unknown_state.state == UNKNOWN and unknown_state.reason != NOT_RESPONDING
    # The query first calls `squeue --me`, which fails here. The held job must then be found without this option.
    fail_with_me_option = (
        'case " $* " in *" --me "*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; esac; '
        f'exec {shutil.which("squeue")} "$@"'
    )
    replace_commands(tmp_path, monkeypatch, squeue=fail_with_me_option, sacct="exit 1")
    states = query_job_states([jobs[0], held_job])
    assert (states[held_job].state, states[held_job].reason) == ("PENDING", "JobHeldUser")
    assert states[jobs[0]].state == UNKNOWN
    status = run_submit(cluster, reference, "status", "runs/tiny").stdout
    assert len(re.findall(r"^(prepare|shard|train|evaluate) +done", status, re.M)) == 4, status
    cluster.output(["scancel", held_job.job_id])


def test_a_job_that_is_being_signalled_is_running(cluster: Cluster) -> None:
    """While Slurm sends a signal, also before a time limit, the state is SIGNALING until the node responds.

    The test suspends the slurmd of the node, so the state persists.
    """
    options = ["-w", "n2", "-o", "/dev/null", "--comment=sluice x", "--wrap", "sleep 60"]
    job_id = cluster.output(["sbatch", "--parsable", *options])
    cluster.wait_job(job_id, "RUNNING")
    init = psutil.Process(Machine("n2", cluster.directory).processes()[-1].pid)
    # While slurmd starts slurmstepd, a fork of slurmd is also a child of init. slurmd is the oldest of these processes.
    processes = [process for process in init.children() if process.name() == "slurmd"]
    slurmd = min(processes, key=lambda process: process.create_time())
    slurmd.suspend()
    try:
        cluster.output(["scancel", "--signal=CONT", job_id])
        [state] = query_job_states([RecordedJob(job_id, ("sluice x",))]).values()
    finally:
        slurmd.resume()
    assert (state.state, state.is_active) == ("SIGNALING", True)
    cluster.output(["scancel", job_id])


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGUSR1]
)
def test_srun_reports_which_signal_killed_a_task(cluster: Cluster, signal_number: signal.Signals) -> None:
    """Each version of Slurm prints different messages (slurm/query/slurm_commands.py)."""
    shell = f"[ $SLURM_PROCID = 0 ] || kill -{int(signal_number)} $$"
    result = cluster.run(["srun", "-N2", "-n2", "--kill-on-bad-exit=0", "sh", "-c", shell], timeout=60)
    failure = SrunLauncher.find_first_failure(result.stderr, result.returncode)
    assert failure is not None and (failure.rank, failure.code) == (1, -signal_number), result.stderr
    assert failure.host[0] == "n", result.stderr


def test_a_stage_is_incomplete_if_its_job_completed_without_its_output(reference: Path, cluster: Cluster) -> None:
    manifest = reference / "runs/tiny/data/manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    try:
        status = run_submit(cluster, reference, "status", "runs/tiny").stdout
    finally:
        manifest.write_bytes(content)
    job_id = get_job_id(reference / "runs/tiny", "shard")
    assert re.search(r"^shard +incomplete", status, re.M), status
    assert re.search(rf"shard incomplete job {job_id} is COMPLETED, but .*manifest\.json", status), status


def test_each_array_task_of_shard_writes_a_separate_log(reference: Path, cluster: Cluster) -> None:
    """`logs` must also say why there is no log: the stage has not started, or there is no such rank."""
    folder = reference / "runs/tiny/jobs/shard"
    logs = [run_submit(cluster, reference, "logs", "runs/tiny", "shard", "--rank", str(task)).stdout for task in (0, 1)]
    units = [set(re.findall(r"unit (\d+) written", text)) for text in logs]
    assert units[0] and units[1] and not units[0] & units[1], logs
    assert (folder / "srun-0.log").exists() and (folder / "srun-1.log").exists()
    errors = (reference / "pending").read_text()
    assert "has not started: job" in errors and "Dependency" in errors
    result = run_submit(cluster, reference, "logs", "runs/tiny", "train", "--rank=7")
    assert "existing logs: rank-0.log, rank-1.log" in result.stderr
    assert run_submit(cluster, reference, "logs", "runs/tiny", "train", "--rank", "supervisor").returncode == 0


def test_logs_and_status_follow_a_run_across_a_requeue_while_another_run_trains(
    reference: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs `left` and `right` train on two nodes each. `left` is requeued after a signal.

    `logs --follow` and `status --watch` show `left` until it ends. Then check the times that `report` computes.
    """
    runs = {name: create_run(tmp_path, reference, name, is_slow=True) for name in ("left", "right")}
    for name in runs:
        assert run_submit(cluster, tmp_path, f"{name}.yaml", *NODES).returncode == 0
    with ThreadPoolExecutor() as pool:
        logs = pool.submit(subprocess.run, [sys.executable, str(CODE_ROOT / "submit.py"), "logs", "runs/left",
                          "train", "--follow"], cwd=tmp_path, capture_output=True, text=True, timeout=240)  # fmt: skip
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "160")
        status = Terminal(tmp_path, "status", "runs/left", "--watch")
        for run in runs.values():
            wait_for("step 4", lambda run=run: len(list(read_jsonl(run / "metrics.jsonl"))) >= 4)  # type: ignore[misc]
        cluster.output(["scancel", "--signal=USR2", get_job_id(runs["left"], "train")])
        assert status.wait(240) == 0
        for run in runs.values():
            wait_for("the end", lambda run=run: "done" in list_event_names(run, "evaluate"))  # type: ignore[misc]
        output = logs.result().stdout
    for text in ("stopped after step", "restored step", "step 20/20"):
        assert text in output, output
    assert re.search(r"train +running +\d+", status.text) and re.search(r"train +done", status.text)
    assert "ETA" in status.text and "BeginTime" in status.text, "Slurm's reason after a requeue is BeginTime"
    for name in runs:
        assert compute_run_digest(Run(tmp_path / f"runs/{name}")) == compute_run_digest(Run(reference / "runs/tiny"))
    left = Run.open(runs["left"])
    all_attempts = read_report_data(left, StatusPoller(left).poll()).attempts
    attempts = [attempt for attempt in all_attempts if attempt.stage == "train"]
    first, second = attempts
    assert first.cause != "done" and second.cause == "done"
    assert second.seconds["queue"] > 4, "Slurm starts a requeued job at least 6 s after the requeue"
    wall_time_s = second.end_time - first.start_time
    assert sum(sum(attempt.seconds.values()) for attempt in attempts) == pytest.approx(wall_time_s)
    assert first.seconds["compute"] > 1 and second.seconds["compute"] > 0.1 and second.seconds["startup"] > 0.5
    report = run_submit(cluster, tmp_path, "report", "runs/left").stdout
    assert "effective training time ratio" in report and re.search(r"train +all", report), report
    page = (runs["left"] / "report.html").read_text()
    assert "<svg" in page and "http" not in page, "the page must load nothing from other hosts"


def test_a_job_that_fails_before_its_supervisor_starts_is_shown_as_failed(
    reference: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """A set-up line of the site exits with 9. The run has no event of the failure; only accounting shows it."""
    run = create_run(tmp_path, reference, "broken", "site.setup=[exit 9]")
    assert run_submit(cluster, tmp_path, "broken.yaml", *NODES, "site.setup=[exit 9]").returncode == 0
    job_id = get_job_id(run, "train")
    wait_for("accounting", lambda: "FAILED" in cluster.output(["sacct", "-nXj", job_id, "-o", "State"]), 30)
    status = run_submit(cluster, tmp_path, "status", "runs/broken").stdout
    assert re.search(r"^train +failed", status, re.M) and re.search(r"^evaluate +never", status, re.M), status
    assert "resume runs/broken" in status
    assert run_submit(cluster, tmp_path, "resume", "runs/broken", "site.setup=[]").returncode == 0
    wait_for("the end", lambda: "done" in list_event_names(run, "evaluate"))
    assert compute_run_digest(Run(tmp_path / "runs/broken")) == compute_run_digest(Run(reference / "runs/tiny"))


def test_the_torchrun_template_trains(
    reference: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template starts the ranks with torchrun, without a supervisor."""
    run = create_run(tmp_path, reference, "torchrun")
    monkeypatch.setenv("RANKS_PER_NODE", "1")
    job_id = submit_template(cluster, "-N2", f"--output={tmp_path}/log", "slurm/templates/torchrun.sbatch", str(run))
    wait_for(
        "the end of the train stage",
        lambda: "done" in list_event_names(run, "train") or cluster.job_state(job_id) == "FAILED",
    )
    [event] = read_event_lines(Run.open(run), "train", "started")
    assert event["ranks"] == 2 and event["slurm_job"] == job_id
    # the layout is the same, so the weights must be identical
    assert compute_run_digest(Run(tmp_path / "runs/torchrun")) == compute_run_digest(Run(reference / "runs/tiny"))


def test_srun_without_a_supervisor_shows_the_first_traceback_and_ends_all_ranks(
    reference: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """Rank 2 fails in step 5, while rank 3 sleeps. After the bug is removed, the same command completes the stage."""
    run = create_run(tmp_path, reference, "srun")
    trainer = run / "code/pipeline/train/trainer.py"
    correct_code = trainer.read_text()
    bug = (
        "        if step == 5 and self.world.rank == 2:\n            raise ValueError('bug in rank two')\n"
        "        if step == 5 and self.world.rank == 3:\n            time.sleep(600)\n"
    )
    step_line = "        lr = self.compute_learning_rate("
    replace_in_file(trainer, step_line, bug + step_line)
    command = ["salloc", "-N2", "--ntasks-per-node=2", "srun", f"--chdir={run}/code"]
    command += [sys.executable, "-m", "pipeline", "train", str(run)]
    start = time.monotonic()
    result = subprocess.run(command, cwd=run / "code", capture_output=True, text=True, timeout=240)
    failures = read_event_lines(Run.open(run), "train", "failed")
    rank_lines = [line for line in result.stderr.splitlines() if line.startswith("rank ")]
    assert result.returncode != 0 and rank_lines[0].startswith("rank 2 on n2: Traceback"), result.stderr
    assert "ValueError: bug in rank two" in result.stderr and result.stderr.count("Traceback") == 1
    assert [(event["rank"], event["host"]) for event in failures] == [(2, "n2")]
    assert time.monotonic() - start < 60, "rank 3, which sleeps for ten minutes, was not killed"
    trainer.write_text(correct_code)
    result = subprocess.run(command, cwd=run / "code", capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    status = run_submit(cluster, tmp_path, "status", "runs/srun").stdout
    assert re.search(r"^train +done .* 2 ", status, re.M), "status must show two attempts"
