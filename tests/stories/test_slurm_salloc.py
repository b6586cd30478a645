"""Test runs inside salloc on a real Slurm. They must use the allocation and show failures in the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.submit.site_environment import SETUP_NOT_RUN
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import create_slow_run, list_event_names, run_submit
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.tiny import make_run, write_config

cluster = cluster_fixture()

pytestmark = pytest.mark.timeout(300)

TENSOR_PARALLEL = ("stages.train.nodes=2", "parallel.tensor=2", "model.dropout=0", "train.micro_batch=4")
SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]


def run_in_allocation(
    cluster: Cluster, folder: Path, options: str, *command: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command inside `salloc` with these options and further environment variables. Return its result."""
    return subprocess.run(
        ["salloc", "--quiet", *options.split(), *command],
        cwd=folder,
        env={**os.environ, **cluster.environment(), "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=280,
    )


def format_supervisor_command(stage: str, run: Run) -> str:
    """Return the shell command that starts the supervisor of a stage."""
    return f"{sys.executable} -m slurm {stage} {run.path}"


def test_a_run_inside_salloc_shows_its_steps_and_its_failures(tmp_path: Path, cluster: Cluster) -> None:
    """Rank 3 fails in step 6. After the bug is removed, `resume` continues the run in another allocation.

    Outside of an allocation, `resume` must not choose between jobs and this machine. The user must add the option
    `--executor slurm` or `--executor local`.
    """
    config = write_config(tmp_path, steps=12)
    overrides = ("stages.train.nodes=2", "stages.evaluate.nodes=2")
    run = create_slow_run(tmp_path, config, overrides)
    trainer = run / "code/pipeline/train/trainer.py"
    correct_code = trainer.read_text()
    step_line = "        lr = self.compute_learning_rate("
    bug = "        if self.world.rank == 3 and step == 6:\n            raise ValueError('bug in rank three')\n"
    replace_in_file(trainer, step_line, f"{bug}{step_line}")
    options = "-N2 --ntasks-per-node=2"
    result = run_in_allocation(cluster, tmp_path, options, *SUBMIT, str(config), *overrides, FORCE_COLOR="1")
    assert result.returncode == ExitCode.CRASHED, result.stdout + result.stderr
    assert "/12  loss" in result.stdout
    assert "rank 3 on n2" in result.stdout and "bug in rank three" in result.stdout
    (event,) = read_event_lines(Run.open(run), "train", "started")
    assert event["ranks"] == 4
    trainer.write_text(correct_code)
    result = run_submit(cluster, tmp_path, "resume", "runs/tiny")
    assert result.returncode == ExitCode.USER_ERROR and "--executor slurm" in result.stderr
    assert "resumed" not in list_event_names(run)
    result = run_in_allocation(cluster, tmp_path, options, *SUBMIT, "resume", "runs/tiny")
    assert result.returncode == 0 and "evaluate  done" in result.stdout, result.stdout + result.stderr
    assert run_submit(cluster, tmp_path, "resume", "runs/tiny", "--executor", "local").returncode == 0


def test_one_command_line_runs_a_script_inside_salloc(tmp_path: Path, cluster: Cluster) -> None:
    """The command uses all tasks of the allocation. It fails on node n2, and continues in another allocation.

    The nodes of a third allocation have different numbers of tasks, so the user must give the number.
    """
    script = 'test "$RANK" != 3 -o -e ok && echo $LOCAL_RANK > $RANK-of-$WORLD_SIZE-on-$SLURMD_NODENAME.txt\n'
    (tmp_path / "script.sh").write_text(script)
    options = "-N2 --ntasks-per-node=2 -wn1,n2"
    command = (*SUBMIT, "run", "--name", "hello", "--output", "3-of-*.txt", "--", "sh", "script.sh")
    result = run_in_allocation(cluster, tmp_path, options, *command)
    work_dir = tmp_path / "runs/hello/work"
    assert result.returncode == ExitCode.CRASHED, result.stdout + result.stderr
    assert "rank 3 on n2" in result.stdout and len(list(work_dir.glob("*.txt"))) == 3
    (work_dir / "ok").touch()
    result = run_in_allocation(cluster, tmp_path, options, *SUBMIT, "resume", "runs/hello")
    assert result.returncode == 0, result.stdout + result.stderr
    files = {file.name: file.read_text().strip() for file in work_dir.glob("*.txt")}
    assert files == {
        "0-of-4-on-n1.txt": "0", "1-of-4-on-n1.txt": "1", "2-of-4-on-n2.txt": "0", "3-of-4-on-n2.txt": "1"
    }  # fmt: skip
    uneven_command = (*SUBMIT, "run", "--name", "uneven", "--", "true")
    result = run_in_allocation(cluster, tmp_path, "-N3 -n5", *uneven_command)
    assert result.returncode == ExitCode.USER_ERROR and "--ntasks-per-node" in result.stderr


@pytest.mark.parametrize(("options", "cpus", "ranks"), [("-N2", "1", 2), ("-N3 -n5 -c2", "2", 5)])
def test_shard_uses_all_tasks_of_the_allocation(
    tmp_path: Path, cluster: Cluster, options: str, cpus: str, ranks: int
) -> None:
    """Run prepare with one rank and shard with all ranks of the allocation. The ranks get the settings of the site.

    The second allocation has five tasks with two CPUs each on three nodes with four CPUs. The step of prepare, with one
    task, must get two CPUs, not all four. `site.setup` is not run in an allocation, and a warning says this.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    secrets = tmp_path / "secrets"
    secrets.write_text("SECRET='hunter2 too'\n")
    secrets.chmod(0o600)
    overrides = [f"site.scratch={scratch}", "site.network_interface=lo", "site.setup=['export OF_SETUP=1']"]
    overrides += [f"site.secrets={secrets}", "site.pass=[PATH]"]
    run = Run.create(load_config(write_config(tmp_path), ["stages.shard.tasks=8", *overrides]))
    entry_point = run.code_dir / "pipeline/__main__.py"
    dump = f"import json, os\nopen('{tmp_path}/ranks', 'a').write(json.dumps(dict(os.environ)) + chr(10))\n"
    replace_in_file(entry_point, "\nimport sys\n", f"\nimport sys\n{dump}")
    command = f"{format_supervisor_command('prepare', run)} && {format_supervisor_command('shard', run)}"
    result = run_in_allocation(cluster, CODE_ROOT, options, "sh", "-c", command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [event["ranks"] for event in read_event_lines(run, "shard", "started")] == [ranks]
    environments = list(read_jsonl(tmp_path / "ranks"))
    assert len(environments) == 1 + ranks and environments[0]["SLURM_CPUS_ON_NODE"] == cpus
    nodes = int(options[2])  # the digit after -N
    assert len({variables["SLURMD_NODENAME"] for variables in environments[1:]}) == nodes
    for variables in environments:
        assert variables["TMPDIR"] == str(scratch) and variables["GLOO_SOCKET_IFNAME"] == "lo"
        assert "OF_SETUP" not in variables and variables["SECRET"] == "hunter2 too"
    assert result.stdout.count(SETUP_NOT_RUN) == 2


def test_the_error_of_srun_is_shown_if_it_cannot_start_a_step(tmp_path: Path, cluster: Cluster) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    command = f"SLURM_MPI_TYPE=nosuch {format_supervisor_command('prepare', run)}"
    result = run_in_allocation(cluster, CODE_ROOT, "-N1", "sh", "-c", command)
    assert result.returncode == ExitCode.CRASHED, result.stderr
    message = read_event_lines(run, "prepare")[-1]["message"]
    assert "srun: error" in message and "nosuch" in message and str(run.jobs_dir / "prepare/srun.log") in message
    assert "rank-0.log" not in message


def test_a_cyclic_distribution_of_tensor_parallel_ranks_is_rejected(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path, overrides=("train.steps=4", *TENSOR_PARALLEL))
    command = ["srun", "--distribution=cyclic", sys.executable, "-m", "pipeline", "train", str(run.path)]
    result = run_in_allocation(cluster, CODE_ROOT, "-N2 --ntasks-per-node=2", *command)
    assert result.returncode != 0 and "--distribution=block" in result.stderr and "Traceback" not in result.stderr
    command[1] = "--distribution=block"
    assert run_in_allocation(cluster, CODE_ROOT, "-N2 --ntasks-per-node=2", *command).returncode == 0
