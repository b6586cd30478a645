"""What a person's shell says to Slurm's commands is for that person's own calls; and runs of very many jobs."""

from __future__ import annotations

import json
import os
import sys
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

PRINTS = f"#!{sys.executable}\nimport json, os, sys\n"
WHO_AND_WHERE = {f"SBATCH_{name}": "x" for name in ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION")}


def tool(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of Slurm's that is this Python code."""
    (folder / name).write_text(PRINTS + code)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH'].removeprefix(f'{folder}:')}")


@pytest.mark.parametrize("name", ["squeue", "sacct", "scancel", "scontrol", "sinfo"])
def test_slurms_commands_do_not_see_a_persons_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tool(tmp_path, name, "print(json.dumps(dict(os.environ)))\n", monkeypatch)
    filters = ["SQUEUE_PARTITION", "SQUEUE_STATES", "SACCT_FEDERATION", "SINFO_SORT", "SCONTROL_ALL", "SCANCEL_BATCH"]
    for variable in (*filters, "SLURM_TIME_FORMAT", "SLURM_CONF", "SLURM_JOB_ID"):
        monkeypatch.setenv(variable, "7")
    seen = json.loads(run_slurm_command(name) or "")
    assert seen["SLURM_CONF"] == seen["SLURM_JOB_ID"] == "7" and not seen.keys() & {*filters, "SLURM_TIME_FORMAT"}
    assert os.environ["SQUEUE_PARTITION"] == "7", "here they stay"


def handed_on(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, stage: str = "train") -> dict[str, str]:
    """The SBATCH_* that sbatch gets for a stage."""
    run = Run.create(load_config(write_config(folder), overrides))
    tool(folder, "sbatch", f"json.dump(dict(os.environ), open('{folder}/seen', 'w'))\n"
         "print('Submitted batch job 7')\n", monkeypatch)  # fmt: skip
    sbatch.submit_stage(run, stage, [], kind="afterok")
    return {key: value for key, value in json.loads((folder / "seen").read_text()).items() if key.startswith("SBATCH_")}


def test_sbatch_does_what_the_script_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for who pays and where, where the config does not say: a stage's keys are its own."""
    overrule = (
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
    for name in overrule:
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    for name in WHO_AND_WHERE:
        monkeypatch.setenv(name, "x")
    assert handed_on(monkeypatch, tmp_path) == WHO_AND_WHERE
    said = ("site.partition=gpu", "site.constraint=''", "stages.evaluate.account=a", "site.sbatch={reservation: r}")
    (tmp_path / "second").mkdir()
    assert handed_on(monkeypatch, tmp_path / "second", *said).keys() == {"SBATCH_ACCOUNT", "SBATCH_QOS"}
    (tmp_path / "third").mkdir()
    assert handed_on(monkeypatch, tmp_path / "third", *said, stage="evaluate").keys() == {"SBATCH_QOS"}
    assert os.environ["SBATCH_SIGNAL"] == "1", "the shell's own stay"
    with without_job_variables():
        assert not [name for name in os.environ if name.startswith("SBATCH_")]


@pytest.mark.parametrize("known", ["squeue", "sacct"])
def test_a_run_of_very_many_jobs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    """One argument of a command may hold 131,071 bytes; jobs of others, which squeue shows then, are not ours."""
    ids = [str(10_000_000 + number) for number in range(14_600)]
    claims = [RecordedJob(job, ("sluice /r",), "here", 1000, "r-train", 1.0) for job in ids]
    row = "|RUNNING|None|n1|here|1000|1970-01-01T00:00:01|r-train|sluice /r"
    if known == "sacct":
        row = row.replace("RUNNING", "COMPLETED")
        monkeypatch.setenv("TZ", "UTC")
        monkeypatch.setattr(slurm_commands, "parse_slurm_time", lambda text: 1.0)
    listing = f"words = sys.argv\nfor job in [*range({ids[0]}, {ids[-1]} + 1), 7]:\n    print(f'{{job}}{row}')\n"
    asked = f"for job in sys.argv[sys.argv.index('-j') + 1].split(','):\n    print(f'{{job}}{row}')\n"
    tool(tmp_path, "squeue", listing if known == "squeue" else "", monkeypatch)
    tool(tmp_path, "sacct", asked if known == "sacct" else "", monkeypatch)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    found = query_job_states(claims)
    wanted = "RUNNING" if known == "squeue" else "COMPLETED"
    assert len(found) == len(ids) and {state.state for state in found.values()} == {wanted}


def test_few_jobs_are_asked_for_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []

    def silent(*command: str, **_: Any) -> str:
        said.append(command)
        return ""

    monkeypatch.setattr(slurm_commands, "run_slurm_command", silent)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    found = query_job_states([RecordedJob("1", cluster="here", uid=0), RecordedJob("2", cluster="here", uid=0)])
    assert {state.state for state in found.values()} == {UNKNOWN}
    assert [command[command.index("-j") + 1] for command in said] and all("1,2" in c or "2,1" in c for c in said)
