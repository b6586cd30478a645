"""Test site profiles, values with special characters, `doctor` and the placement of ranks on a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cli.doctor import Finding, parse_gres, parse_mpi_plugins, parse_partitions, parse_slurm_config, run_checks
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.config.sections import SiteConfig
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.submit.sbatch import render_batch_script
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.tiny import write_config

cluster = cluster_fixture(grace=5, switches=True)
other_cluster = cluster_fixture(accounting=True, user_signal=False, grace=0, preempt="CANCEL")

pytestmark = pytest.mark.timeout(900)


def run_submit(cluster: Cluster, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run submit.py in `folder` with the Slurm of `cluster` and further environment variables. Return its result."""
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    environment = {**os.environ, **cluster.environment(), "COLUMNS": "250", **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def wait_for_empty_queue(cluster: Cluster, timeout: float = 240) -> None:
    """Wait until the queue is empty. Fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while cluster.output(["squeue", "--noheader"]):
        assert time.monotonic() < deadline, cluster.output(["squeue"])
        time.sleep(0.2)


# -- values with special characters ------------------------------------------------------------------------------------

FRAGMENTS = [
    "$(touch pwned)",
    "`touch pwned`",
    "--wrap=x",
    "%j",
    "%%",
    "&&",
    ">x",
    "{a,b}",
    "$HOME",
    "${x}",
    "<<E",
    "\r\n",
]
FRAGMENTS += ["日本", "e\u0301", "\u2028", "\x85", "\U0001f600", "\\", "\n", "\t", "\x7f", "  ", *" \"';|#!*~-=:(]xü"]
TEXT = (
    st.lists(
        st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=8
    )
    .map("".join)
    .filter(lambda text: text not in ("", ".", "..") and len(text.encode()) < 200)
)
RECORDING_PYTHON = """#!/bin/sh
# A replacement for the Python of a job. It writes its arguments and two variables, each terminated by a zero byte.
printf '%s\\0' "$0" "$@" "$TMPDIR" "$PYTHONPATH" > "$RECORDS/$SLURM_JOB_ID"
"""


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """Yield a folder with a short path, because the texts below make paths long."""
    with tempfile.TemporaryDirectory(prefix="sluice-paths-") as folder:
        yield Path(folder)


REJECTED_CHARACTERS = re.compile(r"[\\\x00-\x1f\x7f]")
"""Characters that Sluice may reject. In the path of a run, it may also reject a percent sign."""


# Hypothesis does not shrink a failure, because that would need hundreds of jobs.
@settings(deadline=None, max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(TEXT, TEXT, TEXT, TEXT), min_size=16, max_size=16))
def test_values_reach_a_job_unchanged_or_are_rejected(
    cluster: Cluster, short_folder: Path, values: list[tuple[str, str, str, str]]
) -> None:
    """Each of 16 jobs has four random texts, in this order:

    1. the path of the run, which is used in the log path, the comment, the arguments and PYTHONPATH
    2. `site.scratch`, which becomes TMPDIR
    3. an sbatch option
    4. the path of Python

    If one of the first three texts has a character that may be rejected, rendering the script with it must raise an
    error. The job uses the text without these characters.
    """
    config = load_config(write_config(short_folder))
    base = Path(tempfile.mkdtemp(dir=short_folder))
    records = base / "records"
    records.mkdir()

    def render_script(path: Path, scratch: str, option: str) -> str:
        """Return the batch script for a run path, a scratch folder and an option."""
        site = SiteConfig.model_validate({"scratch": f"/{scratch}", "sbatch": {"wckey": option}})
        return render_batch_script(Run(path), config.model_copy(update={"site": site}), "prepare")

    submitted: dict[str, tuple[Run, str, str, Path]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORDS", str(records))
        patch.setenv("PYTHONPATH", "/and more")
        for number, texts in enumerate(values):
            accepted = [REJECTED_CHARACTERS.sub("", text) or "x" for text in texts]
            accepted[0] = accepted[0].replace("%", "x")
            for index in range(3):
                if accepted[index] != texts[index]:
                    path, scratch, option = (texts[n] if n == index else "x" for n in range(3))
                    with pytest.raises(UserError):
                        render_script(base / path, scratch, option)
            python = base / f"{number} {accepted[3]}" / "python"
            python.parent.mkdir()
            python.write_text(RECORDING_PYTHON)
            python.chmod(0o755)
            run = Run(base / str(number) / accepted[0])
            run.stage_dir("prepare")
            run.code_dir.mkdir()
            patch.setattr(sys, "executable", str(python))
            (base / "job.sh").write_text(render_script(run.path, accepted[1], accepted[2]))
            submitted[cluster.output(["sbatch", "--parsable", base / "job.sh"])] = run, accepted[1], accepted[2], python
    wait_for_empty_queue(cluster)
    # the columns are separated by \x01 and the rows by \x02, because the texts may contain all printable characters
    rows = cluster.output(["squeue", "--noheader", "--states=all", "--format=%A\x01%w\x01%k\x02"]).split("\x02\n")
    columns = (row.rstrip("\x02").split("\x01") for row in rows)
    options_by_job = {job_id: (wckey, comment) for job_id, wckey, comment in columns}
    for job_id, (run, scratch, option, python) in submitted.items():
        lower_case = re.sub("[A-Z]+", lambda match: match[0].lower(), option)  # Slurm converts this option
        assert options_by_job[job_id] == (lower_case, f"sluice {run.path}")
        log = run.jobs_dir / "prepare" / f"{job_id}_0_log.out"
        assert log.read_text() == "" and (records / job_id).exists()
        recorded_texts = (records / job_id).read_bytes().decode().split("\0")
        command = [str(python), "-u", "-m", "submitit.core._submit", str(run.jobs_dir / "prepare")]
        assert recorded_texts == [*command, f"/{scratch}", f"{run.code_dir}:/and more", ""]
    assert not list(short_folder.rglob("pwned")) and not Path("pwned").exists()


# -- a whole run with a profile ----------------------------------------------------------------------------------------


def test_jobs_and_ranks_get_the_settings_of_the_profile(tmp_path: Path, cluster: Cluster) -> None:
    """Submit a run with a site profile and overrides. Check the scripts, the jobs, and the environments of the ranks.

    The edited code writes the environment variables of each rank to the file `ranks`.
    """
    scratch = tmp_path / "sc ratch"
    scratch.mkdir()
    profile = tmp_path / "site.yaml"
    profile.write_text(
        f"network_interface: lo\nscratch: {scratch}\ndistribution: block:cyclic\nswitches: 1@00:03:00\n"
        f"gpus_per_node: 1\ngpus_as: gres\ncpus_per_task: 2\nsbatch: {{nice: 7, exclude: n1}}\n"
        f"setup: ['export OF_SETUP=$NCCL_SOCKET_IFNAME']\n"
        "data_jobs: {partition: high, cpus_per_task: 1, mem_gb: 2, sbatch: {nice: 9}}\n"
    )
    config = write_config(tmp_path, steps=5)
    config.write_text(config.read_text() + "site: {extends: site.yaml}\n")
    secrets = tmp_path / "secrets.sh"
    secrets.write_text("SECRET=hunter2\n")
    secrets.chmod(0o600)
    python = tmp_path / "an environment/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexport ENVIRONMENT_OF=site\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    overrides = (
        *("stages.train.nodes=2", "stages.train.tasks_per_node=2", "optimizer.warmup_steps=1"),
        *(f"site.python={python.parent.parent}", "site.srun={comment: two words, ntasks-per-core: 4}"),
        "parallel.backend=gloo",  # two ranks share a fake GPU
        *(f"site.secrets={secrets}", "site.pass=[PASSED]", "site.export=none", "stages.evaluate.partition=high"),
    )
    # environment of submit.py: a variable for jobs, one that jobs must not get, and variables that must have no effect
    shell_variables = {"PASSED": "hunter2, 'too'", "NOT_PASSED": "x", "SBATCH_EXPORT": "NIL"}
    shell_variables |= {"SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "7", "SQUEUE_PARTITION": "no"}
    run = Run.create(load_config(config, overrides))
    entry_point = run.code_dir / "pipeline/__main__.py"
    dump = f"import json, os\nopen('{tmp_path}/ranks', 'a').write(json.dumps(dict(os.environ)) + chr(10))\n"
    replace_in_file(entry_point, "\nimport sys\n", f"\nimport sys\n{dump}")
    # without the variable in site.pass, submit.py must fail
    result = run_submit(cluster, tmp_path, "tiny.yaml", "--dry-run", *overrides)
    assert result.returncode == ExitCode.USER_ERROR and "PASSED" in result.stderr
    dry_run = run_submit(cluster, tmp_path, "tiny.yaml", "--dry-run", "--scripts", *overrides, **shell_variables)
    result = run_submit(cluster, tmp_path, "tiny.yaml", *overrides, **shell_variables)
    assert result.returncode == 0, result.stderr
    train_job, shard_job, evaluate_job = (
        read_event_lines(run, stage, "submitted")[0]["job_id"] for stage in ("train", "shard", "evaluate")
    )
    script = next((run.jobs_dir / "train").glob("*_submission.sh")).read_text()
    masked_script = script.replace("=$NCCL_SOCKET_IFNAME", "=*****")
    planned_script = dry_run.stdout.partition("# ---- on Slurm: train\n")[2].partition("\n\n# ---- on")[0]
    submitted_lines = [line for line in masked_script.splitlines() if "--dependency" not in line]
    assert submitted_lines == planned_script.splitlines()
    job_info = cluster.output(["scontrol", "--oneliner", "show", "job", train_job])
    for fact in (
        "Nice=7",
        "Switches=1@00:03:00",
        "ExcNodeList=n1",
        "CPUs/Task=2",
        "NtasksPerN:B:S:C=2:",
        "Requeue=1",
    ):
        assert fact in job_info, job_info
    assert "TimeLimit=00:07:00" not in job_info
    assert re.search(r"gres[:/]gpu:1", job_info), job_info  # Slurm 22.05 prints a colon, 24.11 a slash
    assert "Partition=high" in cluster.output(["scontrol", "--oneliner", "show", "job", evaluate_job])
    job_info = cluster.output(["scontrol", "--oneliner", "show", "job", shard_job])
    for fact in ("Partition=high", "Nice=9", "ExcNodeList=n1", "CPUs/Task=1", "MinMemoryNode=2G"):
        assert fact in job_info, job_info
    wait_for_empty_queue(cluster, 240)
    events = read_event_lines(run, "train", "done", "failed")
    assert [event["event"] for event in events] == ["done"], events
    environments = [line for line in read_jsonl(tmp_path / "ranks") if line["SLURM_JOB_ID"] == train_job]
    assert len(environments) == 4
    for variables in environments:
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == variables["OF_SETUP"] == "lo"
        assert variables["ENVIRONMENT_OF"] == "site" and variables["SLURM_NTASKS_PER_CORE"] == "4"
        assert variables["TMPDIR"] == str(scratch) and variables["CUDA_VISIBLE_DEVICES"] == "0"
        assert variables["SLURM_DISTRIBUTION"] == "block:cyclic"
        assert (variables["SECRET"], variables["PASSED"]) == ("hunter2", shell_variables["PASSED"])
        assert "NOT_PASSED" not in variables
    files = [file for file in run.path.rglob("*") if file.is_file() and run.code_dir not in file.parents]
    assert not [file for file in files if b"hunter2" in file.read_bytes()], "no file may contain a secret"
    # site.switches requires two nodes of one switch. n1 is excluded, so these must be n3 and n4.
    assert {variables["SLURMD_NODENAME"] for variables in environments} == {"n3", "n4"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_sbatch_accepts_a_plane_distribution(tmp_path: Path, cluster: Cluster, nodes: int) -> None:
    overrides = (f"stages.train.nodes={nodes}", "stages.train.tasks_per_node=2", "site.distribution=plane=2")
    write_config(tmp_path)
    result = run_submit(cluster, tmp_path, "tiny.yaml", *overrides)
    assert result.returncode == 0, result.stderr
    events = read_event_lines(Run.open(tmp_path / "runs/tiny"), "train", "submitted")
    job_info = cluster.output(["scontrol", "show", "job", events[0]["job_id"]])
    cluster.clear()
    assert f"NumTasks={2 * nodes} " in job_info and "NtasksPerN:B:S:C=2:" in job_info, job_info


# -- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", ["-N2 -n5", "-N3 -n6 -mcyclic", "-N2 -n6 --ntasks-per-node=3 -mplane=2", "-N2 -n4 -mblock:cyclic"]
)
def test_ranks_run_on_the_nodes_that_the_check_computes(cluster: Cluster, options: str) -> None:
    """Compare the result of `assign_ranks_to_nodes` with the nodes on which srun starts the ranks."""
    program = (
        "import os; from pipeline.base.dist_env import read_granted_tasks;"
        "from slurm.query.capacity import assign_ranks_to_nodes;"
        "print(assign_ranks_to_nodes(*read_granted_tasks(os.environ)), flush=True)"
    )
    srun = "srun bash -c 'echo $SLURM_PROCID $SLURM_NODEID' | sort -n"
    shell = f"cd {CODE_ROOT}; {sys.executable} -c '{program}'; {srun}"
    computed, *lines = cluster.output(["salloc", "--quiet", *options.split(), "bash", "-c", shell]).splitlines()
    assert computed == str([int(line.split()[1]) for line in lines])


def test_an_allocation_that_does_not_fit_is_rejected(tmp_path: Path, cluster: Cluster) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["stages.train.nodes=2"]))
    command = ["salloc", "--quiet", "-N2", "-n5", sys.executable, "-m", "slurm", "train", str(run.path)]
    result = cluster.run(command, timeout=240)
    assert result.returncode == ExitCode.USER_ERROR and "Traceback" not in result.stderr
    for fact in ("2 nodes × 2 ranks", "4, 1 ranks", "--ntasks-per-node=2"):
        assert fact in result.stderr
    assert read_event_lines(run, "train")[-1]["cause"] == "placement"


@pytest.mark.parametrize(
    ("options", "fits"), [("-N2 -n6", True), ("-N2 -n7 -mcyclic", True), ("-N2 -n7 -mplane=3", False)]
)
def test_srun_distributes_ranks_evenly_if_the_check_passes(cluster: Cluster, options: str, fits: bool) -> None:
    """2 × 2 ranks run in a larger allocation. With some distributions, srun fills the first node."""
    program = (
        "import os; from pipeline.base.dist_env import read_granted_tasks;"
        "from slurm.query.capacity import describe_placement_problem;"
        "print(describe_placement_problem('train', 2, 2, 1, *read_granted_tasks(os.environ)) is None, flush=True)"
    )
    srun = "srun -N2 -n4 bash -c 'echo $SLURM_STEP_TASKS_PER_NODE'"
    shell = f'cd {CODE_ROOT}; {sys.executable} -c "{program}"; {srun}'
    check_result, *lines = cluster.output(["salloc", "--quiet", *options.split(), "bash", "-c", shell]).splitlines()
    assert check_result == str(fits) and (set(lines) == {"2(x2)"}) == fits


# -- doctor ------------------------------------------------------------------------------------------------------------


def run_doctor(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, check_nodes: bool, site: SiteConfig = SiteConfig()
) -> dict[str, Finding]:
    """Return the findings of `doctor` on a cluster, by subject.

    Args:
        cluster: the test cluster.
        folder: folder for runs.
        monkeypatch: sets the environment variables of the cluster.
        check_nodes: check that compute nodes see the folder.
        site: site settings for this check.
    """
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    return {finding.subject: finding for finding in run_checks(folder, check_nodes, site)}


def test_doctor_describes_the_cluster(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = run_doctor(cluster, tmp_path / "runs", monkeypatch, check_nodes=True)
    low = findings["partition low (default)"]
    high = findings["partition high"]
    assert low.verdict == "ok" and "REQUEUE, GraceTime 5 s" in low.fact and "gpu:h100:2" in low.fact
    assert "4 nodes, MaxTime UNLIMITED" in low.fact and high.meaning == "jobs here are not preempted"
    assert findings["preempt_send_user_signal"].fact == "on" and "USR2" in findings["preempt_send_user_signal"].meaning
    assert findings["accounting"].verdict == "note" and "pmi" in findings["srun --mpi"].fact
    assert findings["MaxArraySize"].fact == "1001" and findings["MaxJobCount"].fact == "10000"
    assert findings["Slurm"].verdict == "ok" and findings["file locks"].verdict == "ok"
    assert findings["run.root"].verdict == "ok" and "compute nodes see it" in findings["run.root"].meaning


def test_doctor_describes_a_cluster_with_other_settings(
    other_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_cluster.output(["scontrol", "update", "PartitionName=high", "State=DOWN"])
    findings = run_doctor(other_cluster, tmp_path, monkeypatch, check_nodes=False)
    low = findings["partition low (default)"]
    assert low.verdict == "note"
    assert "CANCEL, GraceTime 0 s" in low.fact and "a preempted job is cancelled" in low.meaning
    assert findings["partition high"].verdict == "problem" and "DOWN" in findings["partition high"].meaning
    assert findings["preempt_send_user_signal"].fact == "off" and "TERM" in findings["preempt_send_user_signal"].meaning
    assert findings["accounting"].verdict == "ok" and "slurmdbd" in findings["accounting"].fact
    assert "--check-nodes" in findings["run.root"].meaning


def test_doctor_reports_a_folder_that_nodes_do_not_see(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test mounts a file system after the nodes have started. They have their own mount namespaces."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "--make-private", "tmpfs", folder], check=True, timeout=10)
        try:
            finding = run_doctor(cluster, Path(folder), monkeypatch, check_nodes=True)["run.root"]
        finally:
            subprocess.run(["umount", folder], check=True, timeout=10)
    assert finding.verdict == "problem" and "tmpfs" in finding.fact and "No such file" in finding.meaning


def test_doctor_checks_nodes_with_the_site_profile_and_reports_an_error_of_srun(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` must use the partition of the profile for srun. An error in the profile must name its line."""
    findings = run_doctor(cluster, tmp_path, monkeypatch, check_nodes=True, site=SiteConfig(partition="none"))
    assert findings["--check-nodes"].verdict == "note" and "invalid partition" in findings["--check-nodes"].fact
    assert "invalid" not in findings["run.root"].meaning, (
        "an error of srun must not be reported as a problem of the file system"
    )
    monkeypatch.setenv("SLURM_PARTITION", "none")  # as if the user must not use the default partition
    assert "--check-nodes" in run_doctor(cluster, tmp_path, monkeypatch, check_nodes=True)
    findings = run_doctor(cluster, tmp_path, monkeypatch, check_nodes=True, site=SiteConfig(partition="low"))
    assert "--check-nodes" not in findings and "compute nodes see it" in findings["run.root"].meaning
    (tmp_path / "site.yaml").write_text("partition: none\n")
    result = run_submit(cluster, tmp_path, "doctor", "--check-nodes", "--site", "site.yaml")
    assert "no node was reached" in result.stdout, result.stdout + result.stderr
    (tmp_path / "site.yaml").write_text("partitoin: none\n")
    result = run_submit(cluster, tmp_path, "doctor", "--site", "site.yaml")
    assert result.returncode == ExitCode.USER_ERROR and "site.yaml:1: site.partitoin" in result.stderr, result.stderr


def test_doctor_prints_problems_and_advice(cluster: Cluster, tmp_path: Path) -> None:
    result = run_submit(cluster, tmp_path, "doctor")
    assert result.returncode == 0 and "partition low (default)" in result.stdout and "1 problem" in result.stdout
    output = run_submit(cluster, tmp_path, "doctor", PATH="/nowhere").stdout
    assert "no scontrol on PATH" in output and "0 problems" in output
    assert "--executor local" in output
    output = run_submit(cluster, tmp_path, "doctor", SLURM_CONF="/nowhere").stdout
    assert "no response" in output and "1 problem" in output


def test_parsers_read_the_output_of_slurm(cluster: Cluster) -> None:
    config = parse_slurm_config(cluster.output(["scontrol", "show", "config"]))
    # a key without a value: PowerPlugin in Slurm 22.05, PriorityFlags in Slurm 24.11
    empty_key = "PowerPlugin" if "PowerPlugin" in config else "PriorityFlags"
    assert config["SlurmctldHost[0]"].startswith("control(") and config[empty_key] == ""
    assert config["AuthInfo"].endswith(",cred_expire=5") and config["KillWait"] == "5 sec"
    partitions = parse_partitions(cluster.output(["scontrol", "--oneliner", "show", "partition"]))
    assert [partition["PartitionName"] for partition in partitions] == ["low", "high"]
    assert partitions[0]["TotalNodes"] == "4"
    assert parse_gres(cluster.output(["sinfo", "--noheader", "--format=%R|%G"])) == dict.fromkeys(
        ["low", "high"], "gpu:h100:2"
    )
    assert {"none", "pmi2"} <= set(parse_mpi_plugins(cluster.output(["srun", "--mpi=list"])))


NAME = st.from_regex(r"[A-Za-z]\w{0,20}", fullmatch=True)
VALUE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)


@given(st.dictionaries(NAME, VALUE))
def test_parsers_return_any_settings_unchanged(settings: dict[str, str]) -> None:
    text = "".join(f"{name:23} = {value}\n" for name, value in settings.items())
    assert (
        parse_slurm_config(f"Configuration data as of 2026-11-21T05:45:17\n{text}\nSlurmctld(primary) at x is UP\n")
        == settings
    )
    line = " ".join(f"{name}={value}" for name, value in {"PartitionName": "p", **settings}.items())
    assert parse_partitions(f"{line}\n\n") == [{"PartitionName": "p", **settings}]


@given(st.text())
def test_parsers_raise_no_error_for_any_text(text: str) -> None:
    for parse in (parse_slurm_config, parse_partitions, parse_gres, parse_mpi_plugins):
        parse(text)
