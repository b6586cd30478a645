"""Submit one stage with sbatch, and make sure that no job is lost if a submission is interrupted.

The batch step runs one process, the supervisor, which starts the ranks with srun inside the job's allocation. submitit
writes the script (slurm/submit/submitit_job.py). Only `site.setup` and the file `site.secrets` are run as shell code.
All other values of the config are quoted: options by submitit, and the values in shell lines by this module.
:func:`_check_representable` rejects values that sbatch would misread although they are quoted.

Each submission has a random key. The event `submitting` is written before sbatch is called, and `submitted` after it.
If the second event is missing, submit.py was killed or sbatch did not respond. The submission is then unconfirmed: its
job may exist. :func:`confirm_submissions` records the job if Slurm has one with this key. Otherwise it marks the
submission as failed.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.dist_env import without_job_variables
from pipeline.base.errors import UserError
from pipeline.base.files import try_flock
from pipeline.base.ownership import make_ownership_script
from pipeline.config.sections import Config
from pipeline.config.types import parse_time_limit
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.events import NotSubmitted, Submitted, Submitting
from slurm.query import slurm_commands
from slurm.query.capacity import find_planned_placement_problem
from slurm.query.current_job import excluded_nodes_at_submission
from slurm.query.job_states import array_job_id, require_response
from slurm.query.run_jobs import SubmittedJob, find_run_jobs, job_comment, job_identity, list_submissions
from slurm.query.slurm_commands import INTERACTIVE_TIMEOUT_S, SBATCH_ERROR, SBATCH_NO_REPLY
from slurm.submit.site_environment import (
    build_export_option,
    build_site_environment,
    check_job_environment,
    get_job_python,
    secrets_script_lines,
)

if TYPE_CHECKING:
    from slurm.submit.submitit_job import BatchExecutor

MAX_SBATCH_CALLS = 2
"""Maximum number of calls of sbatch for one job. sbatch is called again if it got no reply and Slurm has no job of the
submission."""
SBATCH_TIMEOUT_S = 300.0
"""How long sbatch may take. If the controller is busy, sbatch itself retries for two minutes."""
JOB_SBATCH_TIMEOUT_S = 60.0
"""The shorter limit if a job of the run calls sbatch, or waits for another process that calls sbatch. The job has other
work to do."""
RECHECK_DELAYS_S = (1.0, 2.0, 3.0)
"""Pauses between the queries of Slurm that must all show no job before an unconfirmed submission counts as failed. One
query is not enough: a controller that was suspended may accept the job of a killed sbatch a moment after it responds
again."""
MAX_QUERIES = 20
"""Maximum number of repeated queries in one call of :func:`confirm_submissions`. Without a limit, the call would not
return while other processes keep submitting jobs of the run."""
POLL_S = 0.5
"""Pause between two checks of the controller, or of a script that another process submits."""
SUBMISSION_KEY_VARIABLE = "SLUICE_SUBMISSION"
"""The environment variable of a job that contains the key of its submission."""
_OPTIONS_FROM_ENVIRONMENT = ("account", "constraint", "partition", "qos", "reservation", "wckey")
"""Options whose SBATCH_* variables stay in effect if the config does not set them."""


# ---- the batch script


def job_name(config: Config, stage: str) -> str:
    """Return the name of a stage's jobs.

    The name starts with the stage, because squeue shows only the first eight letters of a name.
    """
    return f"{stage}-{config.run.name}"


def build_sbatch_parameters(run: Run, config: Config, stage: str, dependency: str | None) -> dict[str, Any]:
    """Return submitit's parameters for a job of a stage.

    Args:
        run: the run; the script contains its paths.
        config: the run's config, possibly with secrets masked.
        stage: the stage that the job runs.
        dependency: a Slurm dependency such as `afterok:12:13`; None for no dependency.

    Raises:
        UserError: if options exclude each other, sbatch cannot represent a value, or the ranks of the train stage do
            not fit the requested nodes.
    """
    site = config.resolve_site(stage)
    resources = config.stages.get_resources(stage)
    definition = config.get_stage(stage)
    # how many array tasks may run at the same time; 1000 means no limit in practice (submitit's default is 256)
    array_parallelism = (config.sweep.at_most if config.sweep and definition.is_per_point else None) or 1000
    parameters: dict[str, Any] = {
        "job_name": job_name(config, stage),
        "time": math.ceil(parse_time_limit(resources.time) / 60),  # in minutes
        "nodes": resources.max_requested_nodes,
        "ntasks_per_node": resources.processes_per_node,
        "cpus_per_task": site.cpus_per_task,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint or None,
        "comment": job_comment(run.path),
        "array_parallelism": array_parallelism,
        "dependency": dependency,
        "signal_delay_s": site.signal_s,
        "stderr_to_stdout": True,
        "use_srun": False,  # the supervisor is the process of the batch script, and starts srun itself
        "wckey": None,  # submitit would otherwise set the wckey `submitit`
    }
    options: dict[str, Any] = {}
    if config.track.mail:
        # only the last stage requests END, because Slurm also sends this mail at each requeue (sbatch(1), --mail-type)
        is_last_stage = stage == list(config.active_stages)[-1]
        options["mail-user"] = config.track.mail
        options["mail-type"] = f"FAIL,INVALID_DEPEND{',END' if is_last_stage else ''}"
    # a stage sets an option to false in order to omit an option of `site`
    options |= {key: value for key, value in site.sbatch.items() if value is not False}
    options |= {"requeue" if site.requeue else "no-requeue": True, "distribution": site.distribution}
    options |= {"switches": site.switches, "mem": f"{math.ceil(site.mem_gb * 1024)}M" if site.mem_gb else None}
    options["export"] = build_export_option(site)
    if resources.min_nodes < resources.max_requested_nodes:
        # ntasks_per_node is removed, because Slurm would multiply it by min_nodes to get the number of tasks, and grant
        # no more nodes than tasks
        del parameters["ntasks_per_node"]
        # sbatch reads this option; the single number in `parameters` remains, because submitit computes with it
        options["nodes"] = f"{resources.min_nodes}-{resources.max_requested_nodes}"
        # each node must have enough CPUs for its ranks
        options["mincpus"] = resources.processes_per_node * (site.cpus_per_task or 1)
    elif definition.is_distributed and re.match("plane=", site.distribution or "", re.IGNORECASE):
        # since 24.11, sbatch refuses a plane distribution without --ntasks ("Too few processes")
        options["ntasks"] = resources.max_requested_nodes * resources.processes_per_node
    if stages.continues_without_node(config, stage):
        options["no-kill"] = True
    if site.gpus_per_node and site.gpus_as != "none":
        gpu_type = f"{site.gpu_type}:" if site.gpu_type else ""
        # the value of `gpus_as` is the name of the option
        options[site.gpus_as] = f"{'gpu:' if site.gpus_as == 'gres' else ''}{gpu_type}{site.gpus_per_node}"
    if site.mem_gb and (conflicting := {"mem-per-cpu", "mem-per-gpu"} & options.keys()):
        raise UserError(
            "slurm.conflicting_options",
            f"{stage}: mem_gb and sbatch.{min(conflicting)} exclude each other: remove one from site or stages",
        )
    if definition.is_training and (problem := find_planned_placement_problem(config)):
        raise UserError("slurm.bad_placement", problem)
    exports = build_site_environment(site)
    _check_representable(run.path, {**parameters, **options, **exports})
    parameters["additional_parameters"] = {key: value for key, value in options.items() if value is not None}
    parameters["setup"] = _build_setup_lines(run, config, stage, exports)
    return {key: value for key, value in parameters.items() if value is not None or key == "wckey"}


def _build_setup_lines(run: Run, config: Config, stage: str, exports: Mapping[str, str]) -> list[str]:
    """Return the shell lines that run before the supervisor.

    The lines of `site.setup` follow the exports and can override them. The lines that select the code come after
    `site.setup`, so that `site.setup` cannot change which code runs.

    Args:
        run: the run.
        config: the run's config, possibly with secrets masked.
        stage: the stage that the job runs.
        exports: the environment variables to export.
    """
    # `set --` removes the argument of the script; otherwise, scripts that site.setup sources would see the argument
    lines = [f'export {SUBMISSION_KEY_VARIABLE}="${{1-}}"; set --']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += secrets_script_lines(config.resolve_site(stage)) + config.resolve_site(stage).setup
    path = f"PYTHONPATH={shlex.quote(str(run.code_dir))}${{PYTHONPATH:+:$PYTHONPATH}}"
    lines.append(f"export PYTHONSAFEPATH=1 {path}")  # the same variables as in pipeline.run.code.make_code_env
    return lines + _build_pickle_lines(run.jobs_dir / stage)


def _build_pickle_lines(folder: Path) -> list[str]:
    """Return shell lines that create a link to the pickle of this submission, with the name that submitit expects.

    submitit unpickles what the job runs from this file, whose name contains the job's id. The job itself creates the
    link, because submit.py may have been killed just after sbatch accepted the job.
    """
    quoted_folder = shlex.quote(str(folder))
    pickle_name = f"${{{SUBMISSION_KEY_VARIABLE}}}_${{SLURM_ARRAY_TASK_ID-0}}"
    job_id = "${SLURM_ARRAY_JOB_ID-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID+_$SLURM_ARRAY_TASK_ID}"
    abandoned_pickle = f'{quoted_folder}/"{pickle_name}_given_up.pkl"'
    link = f'{quoted_folder}/"{job_id}_submitted.pkl"'
    return [
        # mark_not_submitted() has renamed the pickle if this submission was given up
        f'[ ! -e {abandoned_pickle} ] || {{ echo "this job was replaced by another one and exits"; exit 0; }}',
        f'[ -z "${SUBMISSION_KEY_VARIABLE}" ] || ln -sf "{pickle_name}_submitted.pkl" {link}',
    ]


def _check_representable(run_path: Path, values: Mapping[str, Any]) -> None:
    """Raise UserError for values that sbatch misreads even if they are quoted (measured on Slurm 22.05).

    A line break ends an option; other control characters are rejected as well. A backslash is dropped. Text that is not
    UTF-8 cannot be written. sbatch replaces a `%` in the path of a log by a job property.
    """
    for key, value in values.items():
        if isinstance(value, str) and (match := re.search(r"[\\\x00-\x1f\x7f\ud800-\udfff]", value)):
            raise UserError(
                "slurm.invalid_character",
                f"{key}: {value!r} contains {match[0]!r}, which an sbatch script cannot represent: rename it",
            )
    if "%" in str(run_path):
        raise UserError(
            "slurm.invalid_character",
            f"{run_path}: Slurm reads % in the path of a log as a pattern: choose another run.root",
        )


def _make_executor(run: Run, config: Config, stage: str, dependency: str | None = None) -> BatchExecutor:
    """Return submitit's executor for one job of a stage. The arguments are those of `build_sbatch_parameters`."""
    from slurm.submit.submitit_job import BatchExecutor

    code_owner = run.code_dir.resolve().parent  # the directory of the run; for a sweep point, that of the sweep
    checked_paths = dict.fromkeys(map(str, (code_owner, code_owner / "code", run.path)))
    ownership_check = make_ownership_script(map(shlex.quote, checked_paths))
    # `exec` replaces the shell with Python: Slurm sends some signals only to the process of the batch script, and such
    # a signal would kill the shell
    python = f"{ownership_check}\nexec {shlex.quote(get_job_python(config.site))}"
    executor = BatchExecutor(run.jobs_dir / stage, python=python)
    executor.update_parameters(**build_sbatch_parameters(run, config, stage, dependency))
    return executor


def render_batch_script(run: Run, config: Config, stage: str, tasks: int = 1) -> str:
    """Return the sbatch script of a stage. This also works on a machine without Slurm.

    Args:
        run: the run.
        config: the run's config, possibly with secrets masked.
        stage: the stage.
        tasks: the number of array tasks; 1 for a job without an array.
    """
    from slurm.submit.submitit_job import render_script

    return render_script(_make_executor(run, config, stage), tasks)


def list_kept_variables(config: Config, stage: str) -> list[str]:
    """Return the names of the user's SBATCH_* variables that stay in effect.

    These are the variables for the options in `_OPTIONS_FROM_ENVIRONMENT` that no config key sets.
    """
    configured = config.resolve_site(stage).model_dump(exclude={"sbatch"}) | config.resolve_site(stage).sbatch
    return [f"SBATCH_{name.upper()}" for name in _OPTIONS_FROM_ENVIRONMENT if configured.get(name) is None]


# ---- submission


class _NoReplyError(Exception):
    """Raised if sbatch reported neither a job id nor a refusal. It is then unknown whether the job exists."""

    def __init__(self, key: str, reason: str, *, is_lost_reply: bool = True) -> None:
        """Create the error.

        Args:
            key: the key of the submission.
            reason: what sbatch printed, or that sbatch did not end in time.
            is_lost_reply: whether the controller's reply was lost. False if sbatch failed for another reason, such as
                an error in a site's wrapper script.
        """
        super().__init__(reason)
        self.key = key
        self.is_lost_reply = is_lost_reply


def print_to_log(message: str) -> None:
    """Print a message to standard error, which goes to the log of this job."""
    print(message, file=sys.stderr, flush=True)


def submit_stage(
    run: Run,
    stage: str,
    after: Sequence[str],
    *,
    dependency_type: str,
    tasks: int = 1,
    points: Sequence[Run] = (),
    say: Callable[[str], None] = print_to_log,
    timeout_s: float = SBATCH_TIMEOUT_S,
    **event_fields: Any,
) -> str:
    """Submit a job that runs the supervisor of a stage.

    Args:
        run: the run; for sweep points, the sweep.
        stage: the stage.
        after: the ids of the jobs on which this job depends.
        dependency_type: the type of this dependency, such as `afterok` (sbatch(1), --dependency).
        tasks: the number of tasks; if more than 1, the job is an array, and its tasks share the work of the stage.
        points: the sweep points for which the stage is submitted. Two or more points become an array with one task for
            each point. Each point records the submission in its events.
        say: prints a message to the user.
        timeout_s: how long sbatch may take, and how long to wait for a controller that does not respond.
        **event_fields: further fields of the events `submitting` and `submitted`.

    Returns:
        The id of the job.

    Raises:
        UserError: if Slurm refuses the job or does not respond in time, or sbatch fails for another reason.
    """
    targets = list(points) or [run]
    for _ in range(MAX_SBATCH_CALLS):
        try:
            return _submit_once(run, stage, after, dependency_type, tasks, targets, timeout_s, event_fields)
        except _NoReplyError as error:
            say(f"{stage:9} sbatch got no response ({error}); querying Slurm for the job …")
            if (job_id := _find_accepted_job(stage, targets, error, say, timeout_s)) is not None:
                return job_id
            reason = str(error)
            if not error.is_lost_reply:
                raise UserError("slurm.sbatch_failed", f"{stage}: sbatch failed: {reason}") from error
    raise UserError(
        "slurm.not_responding",
        f"{stage}: sbatch got no response ({reason}), and Slurm does not have the job: try again later",
    )


def _submit_once(
    run: Run,
    stage: str,
    after: Sequence[str],
    dependency_type: str,
    tasks: int,
    targets: Sequence[Run],
    timeout_s: float,
    event_fields: Mapping[str, Any],
) -> str:
    """Call sbatch once for a job, and record the submission in the events of `targets`. Return the job's id.

    The arguments are those of :func:`submit_stage`. `targets` contains only the run, or the sweep points of the array.

    Raises:
        UserError: if Slurm refuses the job.
        _NoReplyError: if it is not known whether Slurm accepted the job.
    """
    key = secrets.token_hex(6)
    # if the tasks of an array share the work of the stage, each task has the same target, the run
    targets_by_task = [*targets] * tasks
    script, variables = _write_submission(run, stage, key, after, dependency_type, targets_by_task)
    is_array_over_points = len(targets) > 1
    events: list[Submitting] = []
    for task, _ in enumerate(targets):
        suffix = f"_{task}" if is_array_over_points else ""
        # with `aftercorr`, each task depends only on the task with the same index
        awaited_ids = [f"{job_id}{suffix}" for job_id in after] if dependency_type == "aftercorr" else list(after)
        events.append(
            Submitting(
                stage=stage,
                after=awaited_ids,
                executor="slurm",
                kind=dependency_type,
                tasks=tasks,
                array_task=task if is_array_over_points else None,
                key=key,
                **job_identity(job_name(run.config, stage)),
                **event_fields,
            )
        )
    # sbatch inherits the lock, because sbatch may still run when this process has been killed. The script is opened for
    # writing, because an exclusive lock requires this on NFS (flock(2)).
    with open(script, "r+b") as lock:
        try_flock(lock.fileno(), fcntl.LOCK_EX)  # the result is always True, because the call waits for the lock
        for target, event in zip(targets, events, strict=True):
            target.append_event(event)
        try:
            job_id = _call_sbatch(script, key, variables, timeout_s, lock.fileno())
        except UserError as error:
            for target, event in zip(targets, events, strict=True):
                mark_not_submitted(target, event, str(error))
            raise UserError(error.code, f"{stage}: {error}") from error
        # a _NoReplyError is not caught here: the submissions then stay unconfirmed
        for task, (target, event) in enumerate(zip(targets, events, strict=True)):
            record_submission(target, event, f"{job_id}_{task}" if is_array_over_points else job_id)
    return job_id


def _write_submission(
    run: Run, stage: str, key: str, after: Sequence[str], dependency_type: str, targets: Sequence[Run]
) -> tuple[Path, list[str]]:
    """Write the batch script and one pickle for each task. `targets` contains the run or sweep point of each task.

    The other arguments are those of :func:`submit_stage`. `key` is the key of the submission.

    Returns:
        The path of the script, and the names of the SBATCH_* variables that stay in effect.
    """
    from slurm.submit.submitit_job import render_script, write_pickle

    folder = run.stage_dir(stage)
    check_job_environment(run.config.site, os.environ)
    executor = _make_executor(run, run.config, stage, f"{dependency_type}:{':'.join(after)}" if after else None)
    if (excluded_nodes := excluded_nodes_at_submission(targets, stage)) is not None:
        executor.parameters["additional_parameters"]["exclude"] = excluded_nodes
    for task, target in enumerate(targets):
        write_pickle(executor, folder / f"{key}_{task}_submitted.pkl", stage, target, run.code_dir)
    script_path = submission_script_path(run, stage, key)
    script_path.write_text(render_script(executor, len(targets)))
    return script_path, list_kept_variables(run.config, stage)


def _call_sbatch(script: Path, key: str, variables: Sequence[str], timeout_s: float, lock_fd: int) -> str:
    """Call sbatch, and return the id of the job.

    Args:
        script: the batch script.
        key: the key of the submission; the argument of the script.
        variables: names of SBATCH_* variables that stay in effect.
        timeout_s: how long sbatch may take.
        lock_fd: the descriptor of the locked script, which sbatch inherits.

    Raises:
        UserError: if sbatch refuses the job or cannot be started.
        _NoReplyError: if it is not known whether Slurm accepted the job.
    """
    try:
        with without_job_variables(*variables):
            result = subprocess.run(
                ["sbatch", str(script), key],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                pass_fds=[lock_fd],
            )
    except subprocess.TimeoutExpired as error:
        raise _NoReplyError(key, f"it did not end within {timeout_s:.0f} s") from error
    except OSError as error:
        raise UserError("slurm.sbatch_failed", f"sbatch cannot be started: {error.strerror}") from error
    if result.returncode == 0 and (accepted := re.search(r"job ([0-9]+)", result.stdout)):
        return accepted[1]
    message = result.stderr.strip()
    if result.returncode > 0 and SBATCH_ERROR.search(message) and not SBATCH_NO_REPLY.search(message):
        raise UserError("slurm.job_refused", f"sbatch refused the job: {_extract_sbatch_reason(message)}")
    output = message or f"exit code {result.returncode}: {result.stdout.strip()}"
    # the exit code is 0 if sbatch printed no job id, and negative if a signal killed sbatch
    is_lost_reply = result.returncode <= 0 or SBATCH_NO_REPLY.search(output) is not None
    raise _NoReplyError(key, _extract_sbatch_reason(output), is_lost_reply=is_lost_reply)


def _extract_sbatch_reason(output: str) -> str:
    """Return why sbatch failed, in one line: its error lines, or the first 1000 characters if `output` has none."""
    lines = "; ".join(line.strip() for line in output.splitlines() if line.strip())
    return "; ".join(SBATCH_ERROR.findall(output)) or lines[:1000] or "it printed no reason"


def _find_accepted_job(
    stage: str, targets: Sequence[Run], error: _NoReplyError, say: Callable[[str], None], timeout_s: float
) -> str | None:
    """Return the id of the job of a submission to which sbatch got no reply; None if Slurm has no such job.

    Args:
        stage: the stage.
        targets: the run, or the sweep points of the array.
        error: the exception of the call of sbatch.
        say: prints a message to the user.
        timeout_s: the maximum wait for the controller, and then the maximum wait for another process that is still
            calling sbatch for this submission.

    Raises:
        UserError: if the wait takes longer than `timeout_s`, or the run is cancelled during the wait.
    """
    if not wait_for_controller(timeout_s, targets[0].sweep_or_self.check_not_cancelled):
        raise UserError(
            "slurm.submission_unknown",
            f"{stage}: it is not known whether Slurm accepted the job: sbatch got no response ({error}), and the "
            f"controller has not responded since. When it responds again (squeue --me), run: "
            f"{targets[0].resume_command}. This finds the job or submits it",
        )
    confirm_submissions(targets, say, timeout_s)
    submitted = [event for event in targets[0].read_events(stage, Submitted) if event.key == error.key]
    return array_job_id(submitted[0].job_id) if submitted else None


def wait_for_controller(timeout_s: float, check: Callable[[], None]) -> bool:
    """Wait until the controller responds to squeue.

    Args:
        timeout_s: how long to wait.
        check: called after each query without a response; may raise an exception to end the wait.

    Returns:
        Whether the controller responded in time.
    """
    deadline = time.monotonic() + timeout_s
    while slurm_commands.run_slurm_command("squeue", "-h", "--me", "-o", "%i", timeout_s=INTERACTIVE_TIMEOUT_S) is None:
        check()
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


# ---- records of submissions


def submission_script_path(run: Run, stage: str, key: str) -> Path:
    """Return the path of a submission's batch script.

    While sbatch runs, sbatch and the process that called sbatch hold a lock on this file.
    """
    return run.jobs_dir / stage / f"{key}_submission.sh"


def record_submission(
    run: Run, submitting: Submitting | Submitted, job_id: str, job_submitted: float | None = None
) -> None:
    """Write the event `submitted`, which records the job id of a submission.

    Args:
        run: the run.
        submitting: the event `submitting` of the submission. Its fields are copied.
        job_id: the id of the job.
        job_submitted: when the job was submitted, in seconds since 1970; None if it was submitted just now.
    """
    run.append_event(
        Submitted(
            stage=submitting.stage,
            job_id=job_id,
            after=submitting.after,
            executor=submitting.executor,
            kind=submitting.kind,
            tasks=submitting.tasks,
            key=submitting.key or None,
            cluster=submitting.cluster,
            uid=submitting.uid,
            job_name=submitting.job_name,
            step=submitting.step,
            job_submitted=job_submitted,
        )
    )


def record_own_job(run: Run, stage: str, job_id: str) -> None:
    """Write the event `submitted` for the job of this process, if the submission of the job is still unconfirmed.

    Args:
        run: the run.
        stage: the stage that the job runs.
        job_id: the id of the job, such as `12`, or `12_3` for a task of an array.
    """
    key = os.environ.get(SUBMISSION_KEY_VARIABLE)
    for event, job in list_submissions(run) if key else ():
        if job.is_unconfirmed and (job.key, event.stage) == (key, stage):
            task = "" if job.array_task is None else f"_{job.array_task}"
            record_submission(run, event, array_job_id(job_id) + task, job_submitted=job.submit_time)


def mark_not_submitted(run: Run, submitting: Submitting, message: str) -> None:
    """Write the event `not_submitted`, and rename the pickles of the submission.

    If Slurm accepted the job nevertheless, the job finds the renamed pickle and exits as soon as it starts.

    Args:
        run: the run or sweep point.
        submitting: the event that was written before sbatch was called.
        message: why the submission failed.
    """
    stage = submitting.stage
    key = submitting.key
    task = submitting.array_task
    for owner in (run, run.sweep_or_self):  # a point may have been submitted with its sweep
        for pickle in (owner.jobs_dir / stage).glob(f"{key}_{'*' if task is None else task}_submitted.pkl"):
            pickle.rename(pickle.with_name(pickle.name.replace("_submitted", "_given_up")))
    run.append_event(NotSubmitted(stage=stage, key=key, executor="slurm", message=message))


# ---- unconfirmed submissions


def confirm_submissions(
    runs: Sequence[Run],
    say: Callable[[str], None],
    timeout_s: float = SBATCH_TIMEOUT_S,
    jobs: list[SubmittedJob] | None = None,
) -> list[SubmittedJob]:
    """Find out which unconfirmed submissions of `runs` have created a job, and return the jobs of `runs`.

    If Slurm has the job of a submission, the event `submitted` is written. If several queries show no job, the event
    `not_submitted` is written, and the submission is left out of the result. A stray job is returned only if several
    queries show it. Jobs and submissions that appeared too late for several queries are left out and not changed,
    because another process is probably still submitting them.

    Args:
        runs: a run, or a sweep and its points.
        say: prints a message to the user.
        timeout_s: how long to wait for another process that is calling sbatch.
        jobs: the jobs of `runs`, if the caller has just queried them; None to query them.

    Raises:
        UserError: if another process is still calling sbatch after `timeout_s`, or the controller does not respond.
    """
    if jobs is None:
        jobs = find_run_jobs(runs)
    require_response(job.reported_job for job in jobs)
    run_by_path = {run.path: run for run in runs}
    query_counts = Counter({_recheck_key(job) for job in jobs})

    def needs_recheck(job: SubmittedJob) -> bool:
        """Return True if too few queries so far have shown this stray job, or this submission without a job."""
        # one query precedes the pauses in `RECHECK_DELAYS_S`, and one query follows each pause
        key = _recheck_key(job)
        return key is not None and query_counts[key] <= len(RECHECK_DELAYS_S)

    for _ in range(MAX_QUERIES):
        unsure_jobs = list(filter(needs_recheck, jobs))
        if not unsure_jobs:
            break
        for job in unsure_jobs:
            if (submitting := _find_submission_without_job(job)) is not None:
                _wait_for_sbatch(run_by_path[job.run_path], submitting, timeout_s)
        fewest_queries = min(query_counts[_recheck_key(job)] for job in unsure_jobs)
        time.sleep(RECHECK_DELAYS_S[fewest_queries - 1])  # after the first query, the first pause
        jobs = find_run_jobs(runs)
        require_response(job.reported_job for job in jobs)
        query_counts.update({_recheck_key(job) for job in jobs})
    confirmed: list[SubmittedJob] = []
    for job in jobs:
        if needs_recheck(job):
            continue
        if (submitting := _find_submission_without_job(job)) is not None:
            mark_not_submitted(run_by_path[job.run_path], submitting, "no job of this submission is in the queue")
            say(f"{job.stage:9} the submission of {submitting.time} created no job; it counts as failed")
            continue
        if job.job_id and job.event is not None and not job.is_recorded:
            record_submission(run_by_path[job.run_path], job.event, job.job_id, job_submitted=_submission_time(job))
            say(f"{job.stage:9} job {job.job_id} was submitted without a record; it is recorded now")
        confirmed.append(job)
    return confirmed


def confirm_submissions_from_job(runs: Sequence[Run]) -> None:
    """Confirm the unconfirmed submissions of `runs`, in a job that submits or cancels other jobs.

    Slurm is only queried if there is an unconfirmed submission.

    Raises:
        UserError: as :func:`confirm_submissions`.
    """
    if any(job.is_unconfirmed for run in runs for _, job in list_submissions(run)):
        confirm_submissions(runs, print_to_log, JOB_SBATCH_TIMEOUT_S)


def _recheck_key(job: SubmittedJob) -> str | None:
    """Return a key under which to count the queries that show `job`; None if one query is enough.

    Several queries are needed for a submission for which Slurm shows no job, and for an active stray job. While another
    process submits a job, a query may find the event without the job, or the job without the event.
    """
    if (submitting := _find_submission_without_job(job)) is not None:
        return f"submission {submitting.key}"
    return f"job {job.job_id}" if job.is_stray and job.reported_job.is_active else None


def _find_submission_without_job(job: SubmittedJob) -> Submitting | None:
    """Return the `submitting` event of a submission if Slurm shows no job of the submission; otherwise None.

    The result is also None if the submission was made on another cluster, because its jobs cannot be seen here.

    Args:
        job: the submission, with the job that was found for it, if any.
    """
    event = job.event
    if job.job_id or not isinstance(event, Submitting):
        return None
    return event if event.cluster in (None, slurm_commands.cluster_name()) else None


def _submission_time(job: SubmittedJob) -> float:
    """Return when a job was submitted, in seconds since 1970.

    This is the time of its event. Without an event, or if the event has no time, this is Slurm's submit time.
    """
    return job.reported_job.submit_time if job.event is None or not job.event.time else job.event.timestamp


def _wait_for_sbatch(run: Run, submitting: Submitting, timeout_s: float) -> None:
    """Wait until no other process calls sbatch for this submission. Raise UserError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while _is_sbatch_running(run, submitting.stage, submitting.key):
        if time.monotonic() >= deadline:
            raise UserError(
                "slurm.submission_in_progress",
                f"another process is submitting {submitting.stage} of {run.name} (since {submitting.time}), and sbatch "
                "has not responded to it yet: try again later",
            )
        time.sleep(POLL_S)


def _is_sbatch_running(run: Run, stage: str, key: str) -> bool:
    """Return True if a process holds the lock on the batch script of a submission. False if there is no script."""
    for owner in (run, run.sweep_or_self):  # a point may have been submitted with its sweep
        with suppress(FileNotFoundError), open(submission_script_path(owner, stage, key), "rb") as script:
            return not try_flock(script.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    return False
