"""Test that environment variables of the user do not change the Slurm commands. Also test queries of very many jobs."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.dist_env import without_job_variables
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from slurm.query import slurm_commands
from slurm.query.job_states import UNKNOWN, RecordedJob, query_job_states
from slurm.query.slurm_commands import run_slurm_command
from slurm.submit import sbatch
from tests.support.tiny import write_config

SCRIPT_HEAD = f"#!{sys.executable}\nimport json, os, sys\n"
INHERITED_VARIABLES = {f"SBATCH_{name}": "x" for name in ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION")}
"""Variables that sbatch inherits, unless the config sets the key for the same option."""


def write_command(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a Slurm command by a script with this Python code."""
    (folder / name).write_text(SCRIPT_HEAD + code)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH'].removeprefix(f'{folder}:')}")


@pytest.mark.parametrize("name", ["squeue", "sacct", "scancel", "scontrol", "sinfo"])
def test_slurm_commands_do_not_inherit_filters_and_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For example, with SQUEUE_PARTITION squeue would hide jobs of other partitions."""
    write_command(tmp_path, name, "print(json.dumps(dict(os.environ)))\n", monkeypatch)
    filters = ["SQUEUE_PARTITION", "SQUEUE_STATES", "SACCT_FEDERATION", "SINFO_SORT", "SCONTROL_ALL", "SCANCEL_BATCH"]
    for variable in (*filters, "SLURM_TIME_FORMAT", "SLURM_CONF", "SLURM_JOB_ID"):
        monkeypatch.setenv(variable, "7")
    environment = json.loads(run_slurm_command(name) or "")
    assert environment["SLURM_CONF"] == environment["SLURM_JOB_ID"] == "7"
    assert not environment.keys() & {*filters, "SLURM_TIME_FORMAT"}
    assert os.environ["SQUEUE_PARTITION"] == "7", "this process must keep the variables"


def submit_and_read_variables(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, stage: str = "train"
) -> dict[str, str]:
    """Submit a stage with a fake sbatch. Return the SBATCH_* variables that sbatch inherits."""
    folder.mkdir(exist_ok=True)
    run = Run.create(load_config(write_config(folder), overrides))
    code = f"json.dump(dict(os.environ), open('{folder}/environment', 'w'))\nprint('Submitted batch job 7')\n"
    write_command(folder, "sbatch", code, monkeypatch)
    sbatch.submit_stage(run, stage, [], dependency_type="afterok")
    environment = json.loads((folder / "environment").read_text())
    return {name: value for name, value in environment.items() if name.startswith("SBATCH_")}


def test_sbatch_inherits_variables_only_for_options_that_the_config_does_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch inherits only INHERITED_VARIABLES. Other SBATCH_* variables would override options of the script."""
    overriding_names = (
        "NO_REQUEUE",
        "REQUEUE",
        "SIGNAL",
        "ARRAY_INX",
        "TIMELIMIT",
        "EXPORT",
        "GPUS",
        "MEM_PER_NODE",
        "NO_KILL",
    )
    for name in overriding_names:
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    for name in INHERITED_VARIABLES:
        monkeypatch.setenv(name, "x")
    assert submit_and_read_variables(monkeypatch, tmp_path) == INHERITED_VARIABLES
    keys = ("site.partition=gpu", "site.constraint=''", "stages.evaluate.account=a", "site.sbatch={reservation: r}")
    variables = submit_and_read_variables(monkeypatch, tmp_path / "second", *keys)
    assert variables.keys() == {"SBATCH_ACCOUNT", "SBATCH_QOS"}
    variables = submit_and_read_variables(monkeypatch, tmp_path / "third", *keys, stage="evaluate")
    assert variables.keys() == {"SBATCH_QOS"}
    assert os.environ["SBATCH_SIGNAL"] == "1", "this process must keep the variables"
    with without_job_variables():
        assert not [name for name in os.environ if name.startswith("SBATCH_")]


@pytest.mark.parametrize("command", ["squeue", "sacct"])
def test_the_states_of_very_many_jobs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """The IDs do not fit into one argument, which Linux limits to 131,071 bytes.

    squeue is therefore called without IDs and prints all jobs. sacct is called several times.
    """
    ids = [str(10_000_000 + number) for number in range(14_600)]
    submit_time = "2026-11-22T11:51:43"
    timestamp = datetime.fromisoformat(submit_time).timestamp()
    jobs = [RecordedJob(job_id, ("sluice /r",), "here", 1000, "r-train", timestamp) for job_id in ids]
    state = "RUNNING" if command == "squeue" else "COMPLETED"
    row = f"|{state}|None|n1|here|1000|{submit_time}|r-train|sluice /r"
    # squeue also prints a job that is not queried, job 7
    print_all = f"for job in [*range({ids[0]}, {ids[-1]} + 1), 7]:\n    print(f'{{job}}{row}')\n"
    print_queried = f"for job in sys.argv[sys.argv.index('-j') + 1].split(','):\n    print(f'{{job}}{row}')\n"
    write_command(tmp_path, "squeue", print_all if command == "squeue" else "", monkeypatch)
    write_command(tmp_path, "sacct", print_queried if command == "sacct" else "", monkeypatch)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    states = query_job_states(jobs)
    assert len(states) == len(ids) and {job_state.state for job_state in states.values()} == {state}


def test_a_few_jobs_are_queried_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run_command(*command: str, **_: Any) -> str:
        commands.append(command)
        return ""

    monkeypatch.setattr(slurm_commands, "run_slurm_command", run_command)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    states = query_job_states([RecordedJob("1", cluster="here", uid=0), RecordedJob("2", cluster="here", uid=0)])
    assert {state.state for state in states.values()} == {UNKNOWN}
    assert commands and all(command[command.index("-j") + 1] in ("1,2", "2,1") for command in commands)
