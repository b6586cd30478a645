"""A queue in a folder that answers as Slurm does: sbatch, squeue, scancel, scontrol, sacct and sacctmgr for PATH.

Nothing runs. What sbatch does at its n-th call is in `plan` (JSON: {"2": ["refuse", "words"]}); other answers are in
files of the folder that a test may write.
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
NAMES = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")
NO_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class FakeSlurm:
    """The queue, from the outside: for a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        for name in NAMES:
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" {name} "{folder}" "$@"\n')
            program.chmod(0o755)
        self.set_config(ClusterName=CLUSTER, MaxArraySize="1001")

    def set_config(self, **settings: str) -> None:
        """What `scontrol show config` shows."""
        (self.folder / "config").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))

    def plan(self, **calls: list[str]) -> None:
        """What sbatch does at which call (`call_2=["refuse", "words"]`), counted from now on."""
        (self.folder / "plan").write_text(json.dumps({name.removeprefix("call_"): do for name, do in calls.items()}))
        (self.folder / "calls").unlink(missing_ok=True)

    def calls(self) -> int:
        """How often sbatch was called since the last plan."""
        calls = self.folder / "calls"
        return len(calls.read_text().split()) if calls.exists() else 0

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, oldest first."""
        return read_jobs(self.folder)

    def add(self, **facts: Any) -> str:
        """Put a job into the queue; its id."""
        return add_job(self.folder, **facts)

    def queue(self) -> list[tuple[str, str]]:
        """Name and dependency of what is pending or runs, oldest first; ids are replaced by places in this list."""
        alive = [job for job in self.jobs() if job["state"] in ("PENDING", "RUNNING")]
        places = {job["id"]: str(place) for place, job in enumerate(alive)}
        return [
            (job["name"].split("-")[0], re.sub(r"\d+", lambda m: places.get(m[0], f"[{m[0]}]"), job["dependency"]))
            for job in alive
        ]


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "jobs").iterdir(), key=lambda file: int(file.name))
    return [json.loads(file.read_text()) for file in files]


def add_job(folder: Path, **facts: Any) -> str:
    jobs = folder / "jobs"
    number = str(max((int(file.name) for file in jobs.iterdir()), default=0) + 1)
    job: dict[str, Any] = {
        "id": number,
        "state": "PENDING",
        "name": "",
        "comment": "",
        "command": "(null)",
        "dependency": "",
    }
    job |= {"tasks": 0}
    (jobs / number).write_text(json.dumps(job | {"at": time.strftime("%Y-%m-%dT%H:%M:%S")} | facts))
    return number


def sbatch(folder: Path, script: str, *arguments: str) -> int:
    with (folder / "calls").open("a") as calls:
        calls.write("call\n")
    number = len((folder / "calls").read_text().split())
    plan = json.loads((folder / "plan").read_text()) if (folder / "plan").exists() else {}
    do, *words = plan.get(str(number), ["accept"])
    if do == "refuse":
        print(f"sbatch: error: Batch job submission failed: {words[0]}", file=sys.stderr)
        return 1
    if do == "fail":  # as a site's wrapper
        print(words[0], file=sys.stderr)
        return 1
    if do == "hang":
        time.sleep(600)
    if do == "late":  # the controller takes the job when the client has gone
        if os.fork():
            print(NO_ANSWER, file=sys.stderr)
            return 1
        for descriptor in range(1, 64):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        time.sleep(float(words[0]))
    if do != "lose":
        lines = Path(script).read_text().splitlines()
        options = dict(shlex.split(line[8:])[0].partition("=")[::2] for line in lines if line.startswith("#SBATCH "))
        tasks = int(match[1]) + 1 if (match := re.match(r"0-(\d+)", options.get("--array", ""))) else 0
        facts = {"name": options["--job-name"], "comment": options["--comment"], "tasks": tasks}
        facts |= {"dependency": options.get("--dependency", ""), "command": " ".join([script, *arguments])}
        job = add_job(folder, **facts)
    if do == "late":
        os._exit(0)
    if do in ("timeout", "lose"):
        print(NO_ANSWER, file=sys.stderr)
        return 1
    print(f"Submitted batch job {job}")
    return 0


def rows(folder: Path, form: str, expand: bool) -> None:
    for job in read_jobs(folder):
        tasks = [f"_{task}" for task in range(job["tasks"])] if expand and job["tasks"] else [""]
        for task in tasks:
            values = {"%i": job["id"] + task, "%T": job["state"], "%r": job.get("reason", "None"), "%N": ""}
            values |= {"%U": str(os.getuid()), "%V": job["at"], "%j": job["name"], "%k": job["comment"]}
            values |= {"%o": job["command"], "%q": "normal", "%a": "root"}
            print("".join(str(values.get(part, part)) for part in re.split("(%[a-zA-Z])", form)))


def squeue(folder: Path, *arguments: str) -> int:
    if (folder / "silent").exists():
        print("slurm_load_jobs error: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    rows(folder, arguments[arguments.index("-o") + 1], "-r" in arguments)
    return 0


def scancel(folder: Path, *jobs: str) -> int:
    for job in jobs:
        file = folder / "jobs" / job.split("_")[0]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "CANCELLED"}))
    return 0


def main(name: str, folder: Path, *arguments: str) -> int:
    if name == "sbatch":
        return sbatch(folder, *arguments)
    if name == "squeue":
        return squeue(folder, *arguments)
    if name == "scancel":
        return scancel(folder, *arguments)
    answer = folder / ("config" if name == "scontrol" else name + ".out")
    if name == "scontrol" and "partition" in arguments:
        print("PartitionName=low AllowGroups=ALL Default=YES QoS=N/A State=UP")
        return 0
    if name == "scontrol" and "config" not in arguments:
        return 1
    if not answer.exists():
        print(f"{name}: error: it is not here", file=sys.stderr)
        return 1
    lines = answer.read_text().splitlines(keepends=True)
    if name == "sacctmgr":  # lines begin with what is to be shown
        lines = [line.partition(" ")[2] for line in lines if line.partition(" ")[0] in arguments]
    sys.stdout.writelines(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
