"""One stage as an sbatch job, written and submitted by submitit.

The job's batch step is one process, the supervisor; it starts the ranks with srun inside the job's allocation. A
name, path or value of the config never becomes shell code: options are quoted by submitit, the few lines of
set-up are quoted here, and what sbatch would still take for something else is refused (:func:`_refuse_awkward`).
`site.setup` alone (and the file `site.secrets`, which the script only names) is shell, because that is what it is for.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from pipeline.base.errors import UserError
from pipeline.base.ownership import own_folders_shell
from pipeline.base.place import outside_job
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.types import parse_time
from pipeline.run.directory import Run
from slurm.query.exclusion import at_submission
from slurm.query.site_variables import exported, interpreter, refuse_unready, secrets_lines, site_variables
from slurm.query.states import comment_of, identity
from slurm.query.topology import planned_mismatch
from slurm.query.words import SBATCH_ERROR
from slurm.submit.local_job import become

_WHO_AND_WHERE = ("account", "constraint", "partition", "qos", "reservation", "wckey")


def job_name(config: Config, stage: str) -> str:
    """The name of a stage's jobs; squeue shows eight letters."""
    return f"{stage}-{config.run.name}"


def parameters(run: Run, config: Config, stage: str, after: str | None) -> dict[str, Any]:
    """What submitit is told about a stage's job; `after`: a Slurm dependency such as `afterok:12:13`."""
    site, wanted, single = config.site_of(stage), config.stages.of(stage), not STAGES[stage].joined
    values: dict[str, Any] = {
        "job_name": job_name(config, stage),
        "time": math.ceil(parse_time(wanted.time) / 60),
        "nodes": wanted.most_nodes,
        "ntasks_per_node": wanted.per_node,
        "cpus_per_task": site.cpus_per_task,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint or None,
        "comment": comment_of(run.path),
        "array_parallelism": (config.sweep.at_most if config.sweep and STAGES[stage].per_point else None) or 1000,
        "dependency": after,
        "signal_delay_s": site.signal_s,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
    }
    exports = site_variables(site)
    more: dict[str, Any] = {}
    if config.track.mail:  # END would come with each requeue, too (sbatch(1), --mail-type)
        last = stage == list(config.rows)[-1]
        more = {"mail-user": config.track.mail, "mail-type": f"FAIL,INVALID_DEPEND{',END' if last else ''}"}
    more |= {key: value for key, value in site.sbatch.items() if value is not False}
    more |= {"requeue" if site.requeue else "no-requeue": True, "distribution": site.distribution}
    more |= {"switches": site.switches, "mem": f"{math.ceil(site.mem_gb * 1024)}M" if site.mem_gb else None}
    more["export"] = exported(site)
    if wanted.fewest_nodes < wanted.most_nodes:
        # tasks per node would limit the nodes: Slurm multiplies with the fewest, and has no more nodes than tasks
        del values["ntasks_per_node"]
        more["nodes"] = f"{wanted.fewest_nodes}-{wanted.most_nodes}"  # submitit counts with `nodes`, sbatch reads this
        more["mincpus"] = wanted.per_node * (site.cpus_per_task or 1)
    elif not single and re.match("plane=", site.distribution or "", re.IGNORECASE):
        # since 24.11 sbatch does not multiply where it counts whether the planes are filled ("Too few processes")
        more["ntasks"] = wanted.most_nodes * wanted.per_node
    if site.gpus_per_node and site.gpus_as != "none":
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        more[site.gpus_as] = f"{'gpu:' if site.gpus_as == 'gres' else ''}{kind}{site.gpus_per_node}"
    if site.mem_gb and (other := {"mem-per-cpu", "mem-per-gpu"} & more.keys()):
        raise UserError(f"{stage}: mem_gb and sbatch.{min(other)} exclude each other: leave one out of site or stages")
    if STAGES[stage].trains and (reason := planned_mismatch(config)):
        raise UserError(reason)
    _refuse_awkward(run.path, {**values, **more, **exports})
    values["additional_parameters"] = {key: value for key, value in more.items() if value is not None}
    # a person's own lines come later and win, but for the code that runs
    values["setup"] = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    values["setup"] += secrets_lines(site) + site.setup
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


class JobExecutor(submitit.SlurmExecutor):
    """submitit's executor for one stage, which can write the script where there is no Slurm, too."""

    def __init__(self, run: Run, config: Config, stage: str, after: str | None = None) -> None:
        home = run.code.resolve().parent  # for a point of a sweep, this is the sweep
        executed = dict.fromkeys(map(str, (home, home / "code", run.path)))
        check = own_folders_shell(map(shlex.quote, executed))
        # the supervisor takes the shell's place, which would die of a signal that is sent to the batch script alone
        super().__init__(run.jobs / stage, python=f"{check}\nexec {shlex.quote(interpreter(config.site))}")
        self.update_parameters(**parameters(run, config, stage, after))

    @classmethod
    def affinity(cls) -> int:
        """Whether it will do here: always."""
        return 1


def script(run: Run, config: Config, stage: str, tasks: int = 1) -> str:
    """The sbatch script of a stage (`tasks` of it as an array) as submitit writes it; needs no Slurm."""
    executor = JobExecutor(run, config, stage)
    executor.parameters["map_count"] = tasks if tasks > 1 else None
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def kept_variables(config: Config, stage: str) -> list[str]:
    """Of a person's SBATCH_* those that name who pays or where a stage runs, where the config does not say."""
    said = config.site_of(stage).model_dump(exclude={"sbatch"}) | config.site_of(stage).sbatch
    return [f"SBATCH_{name.upper()}" for name in _WHO_AND_WHERE if said.get(name) is None]


def submit(
    run: Run, stage: str, after: Sequence[str], *, kind: str, tasks: int = 1, points: Sequence[Run] = (), **more: Any
) -> str:
    """Submit a stage's supervisor (`tasks` of them as an array); the job's id.

    `after`: ids of jobs that must end first, in the sense of `kind` (sbatch(1), --dependency). `points`: those of a
    sweep's points that the tasks of the array are for; each notes its own. `more` facts go into the event.
    """
    array = _submit(run, stage, after, kind, points or [run] * tasks).split("_")[0]
    more |= {"executor": "slurm", "kind": kind, "tasks": tasks} | identity(job_name(run.config, stage))
    for number, target in enumerate(points or [run]):
        task = f"_{number}" if len(points) > 1 else ""
        waits = [f"{job}{task}" for job in after] if kind == "aftercorr" else list(after)
        target.event("submitted", stage, job_id=array + task, after=waits, **more)
    return array


def _submit(run: Run, stage: str, after: Sequence[str], kind: str, targets: Sequence[Run]) -> str:
    """One sbatch call; the id of its first job."""
    run.stage_folder(stage)
    site = run.config.site
    refuse_unready(site, os.environ)
    executor = JobExecutor(run, run.config, stage, f"{kind}:{':'.join(after)}" if after else None)
    if (avoided := at_submission(targets, stage)) is not None:
        executor.parameters["additional_parameters"]["exclude"] = avoided
    try:
        with outside_job(*kept_variables(run.config, stage)), executor.batch():
            jobs = [executor.submit(become, stage, str(target.path), str(run.code)) for target in targets]
        return str(jobs[0].job_id)
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"{stage}: sbatch refused the job: {_reason(error)}") from error
    except submitit.core.utils.FailedSubmissionError as error:
        raise UserError(f"{stage}: {str(error).splitlines()[0]}") from error


def _reason(error: Exception) -> str:
    """The lines of sbatch's own complaint."""
    return "; ".join(SBATCH_ERROR.findall(str(error))) or (str(error).splitlines() or ["it did not say why"])[-1]
