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
from pipeline.sweep import STAGES as SWEPT
from slurm.environment import outside_job
from slurm.exclusion import at_submission
from slurm.launch import site_variables
from slurm.states import comment_of, identity
from slurm.submission import become
from slurm.topology import planned_mismatch


def _python() -> str:
    """The supervisor takes the shell's place, which would die of a signal that is sent to the batch script alone."""
    return f"exec {shlex.quote(sys.executable)}"


def _job_name(config: Config, stage: str) -> str:
    return f"{config.run.name}-{stage}"


def parameters(run: Run, config: Config, stage: str, after: str | None) -> dict[str, Any]:
    """What submitit is told about a stage's job; `after`: a Slurm dependency such as `afterok:12:13`."""
    site, wanted = config.site.of(stage), getattr(config.stages, stage)
    single = stage in ("prepare", "shard")
    values: dict[str, Any] = {
        "job_name": _job_name(config, stage),
        "time": math.ceil(parse_time(wanted.time) / 60),
        "nodes": 1 if single else wanted.most_nodes,
        "ntasks_per_node": 1 if single else wanted.tasks_per_node,
        "cpus_per_task": site.cpus_per_task,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint or None,
        "comment": comment_of(run.path),
        "dependency": after,
        "signal_delay_s": site.signal_s,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
    }
    exports = site_variables(site)
    more: dict[str, Any] = {key: value for key, value in site.sbatch.items() if value is not False}
    more["requeue" if site.requeue else "no-requeue"] = True
    if not single and wanted.fewest_nodes < wanted.most_nodes:
        # tasks per node would limit the nodes: Slurm multiplies with the fewest, and has no more nodes than tasks
        del values["ntasks_per_node"]
        more["nodes"] = f"{wanted.fewest_nodes}-{wanted.most_nodes}"  # submitit counts with `nodes`, sbatch reads this
        more["mincpus"] = wanted.tasks_per_node * (site.cpus_per_task or 1)
    elif not single and re.match("plane=", site.distribution or "", re.IGNORECASE):
        # since 24.11 sbatch does not multiply where it counts whether the planes are filled ("Too few processes")
        more["ntasks"] = wanted.most_nodes * wanted.tasks_per_node
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
    path = f"PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    values["setup"].append(f"export PYTHONSAFEPATH=1 {path}")  # as launch.with_code
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


def _at_once(config: Config, stage: str) -> int:
    """How many tasks of a stage's array may run at the same time."""
    return (config.sweep.at_most if config.sweep and stage in SWEPT else None) or 1000


def script(run: Run, config: Config, stage: str, tasks: int = 1) -> str:
    """The sbatch script of a stage (`tasks` of it as an array) as submitit writes it; needs no Slurm."""
    command = f"{_python()} {shlex.join(['-u', '-m', 'submitit.core._submit', str(run.jobs / stage)])}"
    array: dict[str, Any] = {"map_count": tasks if tasks > 1 else None, "array_parallelism": _at_once(config, stage)}
    values = parameters(run, config, stage, None)
    return str(_make_sbatch_string(command=command, folder=run.jobs / stage, **array, **values))


def submit(
    run: Run, stage: str, after: Sequence[str], *, kind: str = "afterok", tasks: int = 1, step: int | None = None
) -> str:
    """Submit a stage's supervisor (`tasks` of them as an array); the job's id.

    `after`: ids of jobs that must end first, in the sense of `kind` (sbatch(1), --dependency). `step`: the checkpoint
    that made an evaluation necessary (slurm/evaluations.py).
    """
    job_id = _submit(run, stage, after, kind, [run] * tasks).split("_")[0]
    more = identity(_job_name(run.config, stage)) | ({} if step is None else {"step": step})
    run.event("submitted", stage, job_id=job_id, executor="slurm", after=list(after), kind=kind, tasks=tasks, **more)
    return job_id


def submit_points(run: Run, stage: str, points: Sequence[Run], after: Sequence[str], *, kind: str = "afterok") -> str:
    """Submit a stage of some points of a sweep as one array; its id. Each point notes its own task."""
    array = _submit(run, stage, after, kind, points).split("_")[0]
    more = identity(_job_name(run.config, stage))
    for number, point in enumerate(points):
        job_id = f"{array}_{number}" if len(points) > 1 else array
        waits = [f"{job}_{number}" for job in after] if kind == "aftercorr" and len(points) > 1 else list(after)
        point.event("submitted", stage, job_id=job_id, executor="slurm", after=waits, kind=kind, tasks=1, **more)
    return array


def _submit(run: Run, stage: str, after: Sequence[str], kind: str, targets: Sequence[Run]) -> str:
    """One sbatch call; the id of its first job."""
    executor = submitit.SlurmExecutor(run.stage_folder(stage), python=_python())
    dependency = f"{kind}:{':'.join(after)}" if after else None
    values = parameters(run, run.config, stage, dependency)
    if (avoided := at_submission(targets, stage)) is not None:
        values["additional_parameters"]["exclude"] = avoided
    executor.update_parameters(**values, array_parallelism=_at_once(run.config, stage))
    try:
        with outside_job():
            if len(targets) == 1:
                return str(executor.submit(become, stage, str(targets[0].path), str(run.code)).job_id)
            with executor.batch():
                jobs = [executor.submit(become, stage, str(target.path), str(run.code)) for target in targets]
            return str(jobs[0].job_id)
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"{stage}: sbatch refused the job: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The lines of sbatch's own complaint."""
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("error: ", 1)[-1] for line in lines) or str(error).splitlines()[-1]
