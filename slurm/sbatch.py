"""One stage as an sbatch job, written and submitted by submitit.

The job's batch step is one process, the supervisor; it starts the ranks with srun inside the job's allocation. A
name, path or value of the config never becomes shell code: options are quoted by submitit, the few lines of
set-up are quoted here, and what sbatch would still take for something else is refused (:func:`_refuse_awkward`).
`site.setup` alone is shell, because that is what it is for.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import _make_sbatch_string

from pipeline.config import Config
from pipeline.config_types import parse_time
from pipeline.errors import UserError
from pipeline.run import Run
from slurm.environment import outside_job
from slurm.submission import become, site_variables
from slurm.topology import planned_mismatch


def parameters(run: Run, config: Config, stage: str, after: str | None) -> dict[str, Any]:
    """What submitit is told about a stage's job; `after`: a Slurm dependency such as `afterok:12:13`."""
    site, wanted = config.site, getattr(config.stages, stage)
    single = stage in ("prepare", "shard")
    values: dict[str, Any] = {
        "job_name": f"{config.run.name}-{stage}",
        "time": math.ceil(parse_time(wanted.time) / 60),
        "nodes": 1 if single else wanted.nodes,
        "ntasks_per_node": 1 if single else wanted.tasks_per_node,
        "cpus_per_task": site.cpus_per_task,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "comment": f"sluice {run.path}",
        "dependency": after,
        "signal_delay_s": site.signal_s,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
    }
    exports = site_variables(site)
    more: dict[str, Any] = {key: value for key, value in site.sbatch.items() if value is not False}
    more["requeue" if site.requeue else "no-requeue"] = True
    more.update(distribution=site.distribution, switches=site.switches)
    if site.mem_gb is not None:
        more["mem"] = f"{math.ceil(site.mem_gb * 1024)}M"
    if site.gpus_per_node and not single:
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        if site.gpus_as == "gres":
            more["gres"] = f"gpu:{kind}{site.gpus_per_node}"
        elif site.gpus_as == "gpus-per-node":
            more["gpus-per-node"] = f"{kind}{site.gpus_per_node}"
    if stage == "train" and (reason := planned_mismatch(config)):
        raise UserError(reason)
    _refuse_awkward(run.path, {**values, **more, **exports})
    values["additional_parameters"] = {key: value for key, value in more.items() if value is not None}
    # a person's own lines come later and win, but for the code that runs
    values["setup"] = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()] + site.setup
    values["setup"].append(f"export PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return {key: value for key, value in values.items() if value is not None or key == "wckey"}


def _refuse_awkward(run: Path, values: Mapping[str, Any]) -> None:
    """Raise UserError for what sbatch reads otherwise than it is written, quoted or not (measured, Slurm 22.05).

    A line break ends an option; a backslash is dropped; text that is no UTF-8 cannot be written; `%` in the path of
    a log is a pattern.
    """
    for key, value in values.items():
        if isinstance(value, str) and (bad := re.search(r"[\\\x00-\x1f\x7f\ud800-\udfff]", value)):
            raise UserError(f"{key}: {value!r} has {bad[0]!r} in it, which an sbatch script cannot hold; rename it")
    if "%" in str(run):
        raise UserError(f"{run}: Slurm takes a % in the path of a log for a pattern; choose another run.root")


def script(run: Run, config: Config, stage: str, tasks: int = 1) -> str:
    """The sbatch script of a stage as submitit writes it; needs no Slurm."""
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(run.jobs / stage)])
    count = tasks if tasks > 1 else None
    return str(
        _make_sbatch_string(
            command=command, folder=run.jobs / stage, map_count=count, **parameters(run, config, stage, None)
        )
    )


def submit(run: Run, stage: str, after: Sequence[str], *, kind: str = "afterok", tasks: int = 1) -> str:
    """Submit a stage's supervisor (`tasks` of them as an array); the job's id.

    `after`: ids of jobs that must end first, in the sense of `kind` (sbatch(1), --dependency).
    """
    folder = run.stage_folder(stage)
    executor = submitit.SlurmExecutor(folder)
    dependency = f"{kind}:{':'.join(after)}" if after else None
    executor.update_parameters(**parameters(run, run.config, stage, dependency))
    arguments = (stage, str(run.path), str(run.code))
    try:
        with outside_job():
            if tasks > 1:
                with executor.batch():
                    jobs = [executor.submit(become, *arguments) for _ in range(tasks)]
                job_id = str(jobs[0].job_id).split("_")[0]
            else:
                job_id = str(executor.submit(become, *arguments).job_id)
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"{stage}: sbatch refused the job: {_reason(error)}") from error
    run.event("submitted", stage, job_id=job_id, executor="slurm", after=list(after), kind=kind, tasks=tasks)
    return job_id


def _reason(error: Exception) -> str:
    """The lines of sbatch's own complaint."""
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("error: ", 1)[-1] for line in lines) or str(error).splitlines()[-1]
