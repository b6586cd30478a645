"""Fake sbatch, squeue, scancel, scontrol, sacct and sacctmgr, which keep their jobs as files in a folder.

No job runs. The file `sbatch_outcomes` contains the outcome of calls of sbatch, such as `{"2": ["refuse", "reason"]}`
for the second call:

    accept               the job is accepted (the default)
    refuse, MESSAGE      no job; the controller rejects the submission with this message
    fail, MESSAGE        no job; a wrapper of sbatch prints this message
    hang                 sbatch prints nothing for 600 s; then the job is accepted
    timeout              the job is accepted, but sbatch reports a time-out
    lose                 no job, and sbatch reports a time-out
    late, SECONDS        sbatch reports a time-out, and the job is accepted SECONDS later

Other files of the folder: `config` contains the output of `scontrol show config`, and `sacct.out` the output of sacct.
Each line of `sacctmgr.out` consists of an entity, such as `qos`, and a line of output for this entity. `calls` has a
line for each call of sbatch. If the file `not_responding` exists, squeue fails.

`scontrol show partition` always prints one partition. Other subcommands of scontrol fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

CLUSTER = "fake"
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")
TIMEOUT_MESSAGE = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class FakeSlurm:
    """Write the fake commands into `folder`, control them, and read their jobs. Put `folder` first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        for name in COMMANDS:
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" {name} "{folder}" "$@"\n')
            program.chmod(0o755)
        self.set_config(ClusterName=CLUSTER, MaxArraySize="1001")

    def set_config(self, **settings: str) -> None:
        """Set what `scontrol show config` prints."""
        (self.folder / "config").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))

    def set_sbatch_outcomes(self, **calls: list[str]) -> None:
        """Set the outcome of later calls of sbatch: `call_2=["refuse", "reason"]` is for the second call from now."""
        outcomes = {name.removeprefix("call_"): outcome for name, outcome in calls.items()}
        (self.folder / "sbatch_outcomes").write_text(json.dumps(outcomes))
        (self.folder / "calls").unlink(missing_ok=True)

    def count_sbatch_calls(self) -> int:
        """Return the number of calls of sbatch since `set_sbatch_outcomes`, or since the beginning."""
        calls = self.folder / "calls"
        return len(calls.read_text().split()) if calls.exists() else 0

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, oldest first."""
        return read_jobs(self.folder)

    def add_job(self, **fields: Any) -> str:
        """Add a job and return its ID. Without `state`, the job is pending."""
        return add_job(self.folder, **fields)

    def list_queue(self) -> list[tuple[str, str]]:
        """Return the stage and the dependency of each pending or running job, oldest first.

        The stage is the first part of the job name. In a dependency, the index of a job in this list replaces
        the job ID. The ID of a job that is not in the list is put in brackets.
        """
        active = [job for job in self.list_jobs() if job["state"] in ("PENDING", "RUNNING")]
        index_by_id = {job["id"]: str(index) for index, job in enumerate(active)}
        return [
            (
                job["name"].split("-")[0],
                re.sub(r"\d+", lambda match: index_by_id.get(match[0], f"[{match[0]}]"), job["dependency"]),
            )
            for job in active
        ]


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return all jobs in the folder of a FakeSlurm, oldest first."""
    files = sorted((folder / "jobs").iterdir(), key=lambda file: int(file.name))
    return [json.loads(file.read_text()) for file in files]


def add_job(folder: Path, **fields: Any) -> str:
    """Write the file of a new job with these fields and return its ID."""
    jobs = folder / "jobs"
    job_id = str(max((int(file.name) for file in jobs.iterdir()), default=0) + 1)
    job: dict[str, Any] = {
        "id": job_id,
        "state": "PENDING",
        "name": "",
        "comment": "",
        "command": "(null)",
        "dependency": "",
        "tasks": 0,
        "submit_time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    (jobs / job_id).write_text(json.dumps(job | fields))
    return job_id


def run_sbatch(folder: Path, script: str, *arguments: str) -> int:
    """Act as sbatch with the outcome that is set for this call; return the exit code."""
    with (folder / "calls").open("a") as calls:
        calls.write("call\n")
    call_number = len((folder / "calls").read_text().split())
    outcomes_file = folder / "sbatch_outcomes"
    outcomes = json.loads(outcomes_file.read_text()) if outcomes_file.exists() else {}
    outcome, *details = outcomes.get(str(call_number), ["accept"])
    if outcome == "refuse":
        print(f"sbatch: error: Batch job submission failed: {details[0]}", file=sys.stderr)
        return 1
    if outcome == "fail":  # the message of a site's wrapper of sbatch
        print(details[0], file=sys.stderr)
        return 1
    if outcome == "hang":
        time.sleep(600)
    if outcome == "late":  # a child process accepts the job after this process has exited
        if os.fork():
            print(TIMEOUT_MESSAGE, file=sys.stderr)
            return 1
        for descriptor in range(1, 64):  # otherwise the caller waits for the end of the output
            with contextlib.suppress(OSError):
                os.close(descriptor)
        time.sleep(float(details[0]))
    if outcome != "lose":
        lines = Path(script).read_text().splitlines()
        prefix = "#SBATCH "
        directives = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        options = dict(shlex.split(directive)[0].partition("=")[::2] for directive in directives)
        array = re.match(r"0-(\d+)", options.get("--array", ""))
        job_id = add_job(
            folder,
            name=options["--job-name"],
            comment=options["--comment"],
            tasks=int(array[1]) + 1 if array else 0,
            dependency=options.get("--dependency", ""),
            command=" ".join([script, *arguments]),
        )
    if outcome == "late":
        os._exit(0)
    if outcome in ("timeout", "lose"):
        print(TIMEOUT_MESSAGE, file=sys.stderr)
        return 1
    print(f"Submitted batch job {job_id}")
    return 0


def print_jobs(folder: Path, line_format: str, expand_arrays: bool) -> None:
    """Print the jobs in the format `line_format` of `squeue -o`. If `expand_arrays`, print one line per array task."""
    for job in read_jobs(folder):
        tasks = [f"_{task}" for task in range(job["tasks"])] if expand_arrays and job["tasks"] else [""]
        for task in tasks:
            values = {
                "%i": job["id"] + task,
                "%T": job["state"],
                "%r": job.get("reason", "None"),
                "%N": "",
                "%U": str(os.getuid()),
                "%V": job["submit_time"],
                "%j": job["name"],
                "%k": job["comment"],
                "%o": job["command"],
                "%q": "normal",
                "%a": "root",
            }
            print("".join(str(values.get(part, part)) for part in re.split("(%[a-zA-Z])", line_format)))


def run_squeue(folder: Path, *arguments: str) -> int:
    """Act as squeue, but ignore options that select jobs. Return the exit code."""
    if (folder / "not_responding").exists():
        print("slurm_load_jobs error: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    print_jobs(folder, arguments[arguments.index("-o") + 1], "-r" in arguments)
    return 0


def run_scancel(folder: Path, *job_ids: str) -> int:
    """Act as scancel and return the exit code. Cancelling an array task cancels the whole array."""
    for job_id in job_ids:
        file = folder / "jobs" / job_id.split("_")[0]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "CANCELLED"}))
    return 0


def main(name: str, folder: Path, *arguments: str) -> int:
    """Act as the Slurm command `name` and return the exit code."""
    if name == "sbatch":
        return run_sbatch(folder, *arguments)
    if name == "squeue":
        return run_squeue(folder, *arguments)
    if name == "scancel":
        return run_scancel(folder, *arguments)
    output_file = folder / ("config" if name == "scontrol" else name + ".out")
    if name == "scontrol" and "partition" in arguments:
        print("PartitionName=low AllowGroups=ALL Default=YES QoS=N/A State=UP")
        return 0
    if name == "scontrol" and "config" not in arguments:
        return 1
    if not output_file.exists():
        print(f"{name}: error: not available", file=sys.stderr)
        return 1
    lines = output_file.read_text().splitlines(keepends=True)
    if name == "sacctmgr":  # print the lines for the entity in the command, without the name of the entity
        lines = [line.partition(" ")[2] for line in lines if line.partition(" ")[0] in arguments]
    sys.stdout.writelines(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
