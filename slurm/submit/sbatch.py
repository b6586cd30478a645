"""One stage as an sbatch job, written and submitted by submitit.

The job's batch step is one process, the supervisor; it starts the ranks with srun inside the job's allocation. Events
say before and after each sbatch that it is called, so that no job is lost (slurm/submit/open_submissions.py). A
name, path or value of the config never becomes shell code: options are quoted by submitit, the few lines of
set-up are quoted here, and what sbatch would still take for something else is refused (:func:`_refuse_awkward`).
`site.setup` alone (and the file `site.secrets`, which the script only names) is shell, because that is what it is for.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission

from pipeline.base.dist_env import without_job_variables
from pipeline.base.errors import UserError
from pipeline.base.files import try_flock
from pipeline.base.ownership import make_ownership_script
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.types import parse_time_limit
from pipeline.run.directory import Run
from slurm.query.exclusion import excluded_nodes_at_submission
from slurm.query.job_states import job_comment, job_identity
from slurm.query.site_variables import (
    check_job_environment,
    export_option,
    job_python,
    secrets_script_lines,
    site_environment,
)
from slurm.query.slurm_messages import SBATCH_ERROR, SBATCH_NO_REPLY
from slurm.query.topology import find_planned_placement_problem
from slurm.submit.open_submissions import (
    SBATCH_TIMEOUT_S,
    SUBMISSION_KEY_VARIABLE,
    abandon_submission,
    print_to_log,
    record_submission,
    resolve_open_submissions,
    submission_script_path,
    wait_for_controller,
)
from slurm.submit.submitit_job import become_supervisor

_ATTEMPTS = 2
"""How often sbatch is called for one job, if it does not answer and Slurm did not take the job."""
_WHO_AND_WHERE = ("account", "constraint", "partition", "qos", "reservation", "wckey")


def job_name(config: Config, stage: str) -> str:
    """The name of a stage's jobs; squeue shows eight letters."""
    return f"{stage}-{config.run.name}"


def build_sbatch_parameters(run: Run, config: Config, stage: str, after: str | None) -> dict[str, Any]:
    """What submitit is told about a stage's job; `after`: a Slurm dependency such as `afterok:12:13`."""
    site, wanted, single = (
        config.resolve_site(stage),
        config.stages.get_resources(stage),
        not STAGES[stage].is_distributed,
    )
    values: dict[str, Any] = {
        "job_name": job_name(config, stage),
        "time": math.ceil(parse_time_limit(wanted.time) / 60),
        "nodes": wanted.max_nodes,
        "ntasks_per_node": wanted.processes_per_node,
        "cpus_per_task": site.cpus_per_task,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint or None,
        "comment": job_comment(run.path),
        "array_parallelism": (config.sweep.at_most if config.sweep and STAGES[stage].is_per_point else None) or 1000,
        "dependency": after,
        "signal_delay_s": site.signal_s,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
    }
    exports = site_environment(site)
    more: dict[str, Any] = {}
    if config.track.mail:  # END would come with each requeue, too (sbatch(1), --mail-type)
        last = stage == list(config.active_stages)[-1]
        more = {"mail-user": config.track.mail, "mail-type": f"FAIL,INVALID_DEPEND{',END' if last else ''}"}
    more |= {key: value for key, value in site.sbatch.items() if value is not False}
    more |= {"requeue" if site.requeue else "no-requeue": True, "distribution": site.distribution}
    more |= {"switches": site.switches, "mem": f"{math.ceil(site.mem_gb * 1024)}M" if site.mem_gb else None}
    more["export"] = export_option(site)
    if wanted.min_nodes < wanted.max_nodes:
        # tasks per node would limit the nodes: Slurm multiplies with the fewest, and has no more nodes than tasks
        del values["ntasks_per_node"]
        more["nodes"] = f"{wanted.min_nodes}-{wanted.max_nodes}"  # submitit counts with `nodes`, sbatch reads this
        more["mincpus"] = wanted.processes_per_node * (site.cpus_per_task or 1)
    elif not single and re.match("plane=", site.distribution or "", re.IGNORECASE):
        # since 24.11 sbatch does not multiply where it counts whether the planes are filled ("Too few processes")
        more["ntasks"] = wanted.max_nodes * wanted.processes_per_node
    if site.gpus_per_node and site.gpus_as != "none":
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        more[site.gpus_as] = f"{'gpu:' if site.gpus_as == 'gres' else ''}{kind}{site.gpus_per_node}"
    if site.mem_gb and (other := {"mem-per-cpu", "mem-per-gpu"} & more.keys()):
        raise UserError(f"{stage}: mem_gb and sbatch.{min(other)} exclude each other: leave one out of site or stages")
    if STAGES[stage].is_training and (reason := find_planned_placement_problem(config)):
        raise UserError(reason)
    _refuse_awkward(run.path, {**values, **more, **exports})
    values["additional_parameters"] = {key: value for key, value in more.items() if value is not None}
    # a person's own lines come later and win, but for the code that runs
    values["setup"] = [f'export {SUBMISSION_KEY_VARIABLE}="${{1-}}"; set --']  # no argument for what site.setup sources
    values["setup"] += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    values["setup"] += secrets_script_lines(site) + site.setup
    path = f"PYTHONPATH={shlex.quote(str(run.code_dir))}${{PYTHONPATH:+:$PYTHONPATH}}"
    values["setup"].append(f"export PYTHONSAFEPATH=1 {path}")  # as make_code_env
    values["setup"] += _pickle_lines(run.jobs_dir / stage)
    return {key: value for key, value in values.items() if value is not None or key == "wckey"}


def _pickle_lines(folder: Path) -> list[str]:
    """Shell that gives the pickle of this submission the name under which submitit looks for it.

    The job needs nobody for that: submit.py may have been killed when sbatch had just accepted it.
    """
    pickle = f'{shlex.quote(str(folder))}/"${{{SUBMISSION_KEY_VARIABLE}}}_${{SLURM_ARRAY_TASK_ID-0}}'
    job = "${SLURM_ARRAY_JOB_ID-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID+_$SLURM_ARRAY_TASK_ID}"
    target = f'"${{{SUBMISSION_KEY_VARIABLE}}}_${{SLURM_ARRAY_TASK_ID-0}}_submitted.pkl"'
    return [
        f'[ ! -e {pickle}_given_up.pkl" ] || {{ echo "another job has taken the place of this one"; exit 0; }}',
        f'[ -z "${SUBMISSION_KEY_VARIABLE}" ] || ln -sf {target} {shlex.quote(str(folder))}/"{job}_submitted.pkl"',
    ]


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
        home = run.code_dir.resolve().parent  # for a point of a sweep, this is the sweep
        executed = dict.fromkeys(map(str, (home, home / "code", run.path)))
        check = make_ownership_script(map(shlex.quote, executed))
        # the supervisor takes the shell's place, which would die of a signal that is sent to the batch script alone
        super().__init__(run.jobs_dir / stage, python=f"{check}\nexec {shlex.quote(job_python(config.site))}")
        self.update_parameters(**build_sbatch_parameters(run, config, stage, after))

    @classmethod
    def affinity(cls) -> int:
        """Whether it will do here: always."""
        return 1

    def script(self, tasks: int) -> str:
        """The sbatch script, of an array if `tasks` are more than one, as submitit writes it."""
        self.parameters["map_count"] = tasks if tasks > 1 else None
        return str(self._make_submission_file_text(self._submitit_command_str, ""))


def render_batch_script(run: Run, config: Config, stage: str, tasks: int = 1) -> str:
    """The sbatch script of a stage (`tasks` of it as an array) as submitit writes it; needs no Slurm."""
    return JobExecutor(run, config, stage).script(tasks)


def kept_variables(config: Config, stage: str) -> list[str]:
    """Of a person's SBATCH_* those that name who pays or where a stage runs, where the config does not say."""
    said = config.resolve_site(stage).model_dump(exclude={"sbatch"}) | config.resolve_site(stage).sbatch
    return [f"SBATCH_{name.upper()}" for name in _WHO_AND_WHERE if said.get(name) is None]


def submit_stage(
    run: Run,
    stage: str,
    after: Sequence[str],
    *,
    kind: str,
    tasks: int = 1,
    points: Sequence[Run] = (),
    say: Callable[[str], None] = print_to_log,
    patience_s: float = SBATCH_TIMEOUT_S,
    **more: Any,
) -> str:
    """Submit a stage's supervisor (`tasks` of them as an array); the job's id.

    `after`: ids of jobs that must end first, in the sense of `kind` (sbatch(1), --dependency). `points`: those of a
    sweep's points that the tasks of the array are for; each notes its own. `more` facts go into the events.
    `patience_s`: how long sbatch may take, and how long to wait for a controller that did not answer it.

    Raises UserError if Slurm refuses the job, or does not answer in time.
    """
    targets = list(points) or [run]
    for _ in range(_ATTEMPTS):
        try:
            return _submit(run, stage, after, kind, tasks, targets, patience_s, more)
        except _NoAnswerError as error:
            say(f"{stage:9} sbatch got no answer ({error}); asking Slurm whether it has the job …")
            if (job := _find_submitted(stage, targets, error, say, patience_s)) is not None:
                return job
            reason = str(error)
            if not error.is_lost_answer:
                raise UserError(f"{stage}: sbatch failed: {reason}") from error
    raise UserError(f"{stage}: sbatch got no answer ({reason}), and Slurm does not have the job: try again later")


def _find_submitted(
    stage: str, targets: Sequence[Run], error: _NoAnswerError, say: Callable[[str], None], patience_s: float
) -> str | None:
    """Return the id of the job of a submission that sbatch got no answer to; None if Slurm did not take it."""
    if not wait_for_controller(patience_s, targets[0].sweep_or_self.check_not_cancelled):
        raise UserError(
            f"{stage}: it is not known whether Slurm took the job: sbatch got no answer ({error}), and the "
            f"controller does not answer since. When it does (squeue --me): {targets[0].resume_command} "
            "finds the job, or submits it"
        )
    resolve_open_submissions(targets, say, patience_s)
    known = [e for e in targets[0].read_events(stage, "submitted") if e.get("key") == error.key]
    return str(known[0]["job_id"]).split("_")[0] if known else None


class _NoAnswerError(Exception):
    """It is not known whether Slurm took a job."""

    def __init__(self, key: str, reason: str, *, is_lost_answer: bool = True) -> None:
        """is_lost_answer: False if sbatch failed with a message of its own, such as that of a site's wrapper."""
        super().__init__(reason)
        self.key, self.is_lost_answer = key, is_lost_answer


def _submit(
    run: Run,
    stage: str,
    after: Sequence[str],
    kind: str,
    tasks: int,
    targets: Sequence[Run],
    timeout_s: float,
    more: Mapping[str, Any],
) -> str:
    """Submit once. Raises UserError if Slurm refuses the job, _NoAnswerError if it may have taken it."""
    key, number = secrets.token_hex(6), len(targets)
    script, variables = _write_submission(run, stage, key, after, kind, [*targets] * tasks)
    facts: list[dict[str, Any]] = []
    for task, _ in enumerate(targets):
        each = f"_{task}" if number > 1 else ""
        waits = [f"{job}{each}" for job in after] if kind == "aftercorr" else list(after)
        own = {"array_task": task} if number > 1 else {}
        facts.append({"stage": stage, "after": waits, "executor": "slurm", "kind": kind, "tasks": tasks, **own})
        facts[-1] |= {"key": key} | job_identity(job_name(run.config, stage)) | dict(more)
    with open(script, "r+b") as lock:  # held by sbatch, too: it may live longer than this process
        try_flock(lock.fileno(), fcntl.LOCK_EX)
        for target, each_facts in zip(targets, facts, strict=True):
            target.event("submitting", **each_facts)
        try:
            array = _call_sbatch(script, key, variables, timeout_s, lock.fileno())
        except UserError as error:
            for target, each_facts in zip(targets, facts, strict=True):
                abandon_submission(target, each_facts, str(error))
            raise UserError(f"{stage}: {error}") from error
        for task, (target, each_facts) in enumerate(zip(targets, facts, strict=True)):
            record_submission(target, each_facts, f"{array}_{task}" if number > 1 else array)
    return array


def _write_submission(
    run: Run, stage: str, key: str, after: Sequence[str], kind: str, targets: Sequence[Run]
) -> tuple[Path, list[str]]:
    """Write the batch script and the pickle of each task; the script, and which SBATCH_* variables may stay."""
    folder, site = run.stage_dir(stage), run.config.site
    check_job_environment(site, os.environ)
    executor = JobExecutor(run, run.config, stage, f"{kind}:{':'.join(after)}" if after else None)
    if (avoided := excluded_nodes_at_submission(targets, stage)) is not None:
        executor.parameters["additional_parameters"]["exclude"] = avoided
    for task, target in enumerate(targets):
        submission = DelayedSubmission(become_supervisor, stage, str(target.path), str(run.code_dir))
        submission.set_timeout(executor.parameters["time"], executor.max_num_timeout)
        submission.dump(folder / f"{key}_{task}_submitted.pkl")
    script_path = submission_script_path(run, stage, key)
    script_path.write_text(executor.script(len(targets)))
    return script_path, kept_variables(run.config, stage)


def _call_sbatch(script: Path, key: str, variables: Sequence[str], timeout_s: float, lock: int) -> str:
    """Call sbatch; the job's id. Raises UserError if it refuses the job, _NoAnswerError if the outcome is not known."""
    try:
        with without_job_variables(*variables):
            done = subprocess.run(
                ["sbatch", str(script), key],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                pass_fds=[lock],
            )
    except subprocess.TimeoutExpired as error:
        raise _NoAnswerError(key, f"it did not end within {timeout_s:.0f} s") from error
    except OSError as error:
        raise UserError(f"sbatch cannot be started: {error.strerror}") from error
    if done.returncode == 0 and (accepted := re.search(r"job ([0-9]+)", done.stdout)):
        return accepted[1]
    said = done.stderr.strip()
    if done.returncode > 0 and SBATCH_ERROR.search(said) and not SBATCH_NO_REPLY.search(said):
        raise UserError(f"sbatch refused the job: {_reason(RuntimeError(said))}")
    reason = said or f"exit code {done.returncode}: {done.stdout.strip()}"
    failed = done.returncode > 0 and not SBATCH_NO_REPLY.search(reason)
    raise _NoAnswerError(key, _reason(RuntimeError(reason)), is_lost_answer=not failed)


def _reason(error: Exception) -> str:
    """Return the lines in which sbatch says why; all that was printed, if none of them is sbatch's own."""
    said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return "; ".join(SBATCH_ERROR.findall(str(error))) or said[:1000] or "it did not say why"
