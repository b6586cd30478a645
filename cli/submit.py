"""`python submit.py CONFIG`: create the run of a config, or find it, and run the stages that are not done.

All errors that can be detected early are reported before anything is created or queued (:func:`check_submission`).
`--dry-run` makes the same checks, and then prints what would run (:func:`print_plan`). Users paste this output into
tickets and chats. Values that may be secret are therefore masked (pipeline/config/masking.py). Except for the masked
values, the printed scripts are those that would be submitted.

A user may also correct a config and submit it again. If the run already exists, the changes of its config are called
corrections (`Run.corrections`).
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from cli.common import DryRun, Overrides, PreviewMachine, Scripts, console
from pipeline.base.command import format_command
from pipeline.base.errors import ExitCode, UserError, limit_lines
from pipeline.base.ownership import describe_replacement_risk
from pipeline.config.masking import describe_exposed_setup, mask_secrets
from pipeline.config.read import dump_config, load_config
from pipeline.config.search import Distribution, SearchConfig, compute_rungs
from pipeline.config.sections import Config
from pipeline.config.site import SiteConfig
from pipeline.config.types import parse_time_limit
from pipeline.config.user_model import resolve_user_model
from pipeline.data.manifest import format_training_length
from pipeline.parallel.mesh import describe_layout, resolve_layout
from pipeline.run import stages
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.search.sampler import check_optuna
from planning.memory_check import check_memory, memory_warnings
from slurm.query.capacity import check_capacity
from slurm.query.run_jobs import describe_running_stages, uses_slurm
from slurm.query.slurm_commands import is_slurm_responding
from slurm.submit.chain import reset_for_resume, submit_chain
from slurm.submit.executor import Executor, choose_executor
from slurm.submit.sbatch import build_sbatch_parameters, render_batch_script
from slurm.submit.site_environment import check_job_environment
from slurm.supervise.decision import SIGNAL_EARLY_S
from tracking.tracker import check_tracker_packages

_MAX_POINTS_SHOWN = 3
"""Maximum number of points of a sweep that a dry run prints."""
STARTUP_ALLOWANCE_S = 60
"""Seconds that an attempt may take to start: imports from a shared file system, rendezvous, loading a checkpoint."""


def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")],
    overrides: Overrides = None,
    dry_run: DryRun = False,
    scripts: Scripts = False,
    machine: PreviewMachine = None,
    executor: Annotated[
        Executor,
        typer.Option(
            help="where to run; auto: Slurm if the run used Slurm before, otherwise this allocation if inside salloc, "
            "otherwise Slurm if it responds, otherwise this machine"
        ),
    ] = "auto",
) -> None:
    """Create the run of a config, or find it, and run the stages that are not done."""
    if (config / "config.yaml").is_file():
        raise UserError(
            "cli.run_as_config",
            f"{config} is a run, not a config. To continue this run: {format_command('resume', str(config))}",
        )
    if (scripts or machine is not None) and not dry_run:
        raise UserError("cli.conflict", "--scripts and --machine require --dry-run")
    loaded_config = load_config(config, overrides or ())
    existing_run = Run(loaded_config.run.root / loaded_config.run.name)
    chosen_executor = executor
    if executor != "slurm" or not dry_run:  # a dry run for Slurm also works without a controller
        is_on_slurm = existing_run.config_file.exists() and uses_slurm(existing_run)
        # a run that did not use Slurm before is treated as a new run
        chosen_executor = choose_executor(executor, existing_run if is_on_slurm else None)
    checked_run = check_submission(loaded_config, chosen_executor == "slurm")
    corrections = checked_run.corrections
    if dry_run:
        # unlike `loaded_config`, this config includes the changes that `resume` has made to the run
        config_to_run = checked_run.config
        notes = [*describe_inputs(checked_run), *checked_run.code_notes]
        if chosen_executor == "local":
            notes += note_oversubscription(config_to_run)
        print_plan(
            config_to_run, chosen_executor, console, notes, scripts=scripts, machine=machine, corrections=corrections
        )
        return
    if corrections:
        existing_run.check_not_running(describe_running_stages(existing_run))
    run = Run.create(loaded_config)
    if corrections:
        for key, change in corrections.items():
            console.print(f"corrected {key}: {change}", soft_wrap=True)
        reset_for_resume(run, replaces_jobs=True)
    run.code_notes = checked_run.code_notes
    start_run(run, chosen_executor, is_resumed=bool(corrections))


def start_run(run: Run, executor: Executor, *, is_resumed: bool) -> None:
    """Submit the missing jobs of a run, or run its stages on this machine until they end.

    Args:
        run: the run.
        executor: where the stages run; not `auto`.
        is_resumed: whether to submit failed stages again.

    Raises:
        typer.Exit: if the stages ran on this machine, with the exit code of `run_chain_locally`.
    """
    console.print(f"run {run.name}", soft_wrap=True)
    for warning in list_warnings(run, executor):
        console.print(warning, soft_wrap=True)
    if executor == "slurm":
        with run.lock_exclusively():  # a second `submit` waits, and then finds the jobs of the first one
            submit_chain(run, console, resubmit_failed=is_resumed)
        return
    from slurm.query.status import describe_outcome
    from slurm.submit.local_runner import run_chain_locally

    code = run_chain_locally(run, console)
    if code == ExitCode.DONE:
        console.print(describe_outcome(run), soft_wrap=True)
    raise typer.Exit(code)


def check_submission(config: Config, on_slurm: bool) -> Run:
    """Check a config, and return its run. The run may not exist on disk yet.

    The inputs of a stage are checked only if the stage has not read them yet. If `site.container` is set, they are not
    checked, because paths inside the container differ from the paths here.

    Args:
        config: the config.
        on_slurm: whether the stages will run as Slurm jobs, which are then also checked.

    Raises:
        UserError: if the run cannot be created, or the config cannot be applied to the existing run. Also if the inputs
            cannot be used, a job cannot be submitted, or a package that `track` requires is not installed.
    """
    run = Run.preview(config)
    check_tracker_packages(config)
    if config.sweep is not None and config.sweep.search is not None and config.site.python is None:
        check_optuna()
    if config.site.container is None:
        stages.check_stage_inputs(run)
    if on_slurm:
        check_jobs(run)
    if run.will_copy_code:
        run.code_notes = run.check_model_code()  # the last check, because it may take seconds
    return run


def check_jobs(run: Run) -> None:
    """Raise UserError if a job of the run cannot be submitted.

    The function checks that sbatch can represent all options, and that a partition can satisfy each request. It also
    checks the variables of `site.pass` and the file `site.secrets`.
    """
    check_job_environment(run.config.site, os.environ)
    for stage in run.config.active_stages:
        build_sbatch_parameters(run, run.config, stage, None)
    check_capacity(run)


def list_warnings(run: Run, executor: Executor) -> Iterator[str]:
    """Yield the warnings and notes to print when a run starts or resumes."""
    yield from filter(None, (describe_exposed_setup(run.config), describe_replacement_risk(run.path)))
    yield from stages.list_resume_notes(run)
    yield from run.code_notes
    if run.config.has_pipeline and stages.load_stage_module(run, "train").describe_missing_outputs(run):
        yield from memory_warnings(run.config, executor)
    if executor == "slurm":
        yield from _warn_of_short_time_limits(run)
    elif executor == "local":
        yield from note_oversubscription(run.config)


def describe_short_time_limit(config: Config, stage: str) -> str | None:
    """Return a description of a stage's time limit if the limit is too short to start and save; otherwise None.

    Only the time before Slurm's signal (`site.signal_s`) counts, because the stage saves and exits after the signal.
    """
    signal_s = config.site.signal_s
    remaining_s = parse_time_limit(config.stages.get_resources(stage).time) - signal_s - SIGNAL_EARLY_S
    if remaining_s >= STARTUP_ALLOWANCE_S:
        return None
    return (
        f"short: Slurm signals {signal_s} s before the end (site.signal_s), or up to {SIGNAL_EARLY_S:.0f} s earlier; "
        f"that leaves {max(0, remaining_s):.0f} s to start and to train"
    )


def _warn_of_short_time_limits(run: Run) -> Iterator[str]:
    """Yield a warning for each stage whose time limit is too short. Except in a sweep, done stages are left out."""
    for stage in run.config.active_stages:
        problem = describe_short_time_limit(run.config, stage)
        if problem and (run.config.sweep or stages.load_stage_module(run, stage).describe_missing_outputs(run)):
            yield f"warning: stages.{stage}.time: {run.config.stages.get_resources(stage).time} is {problem}"


def describe_inputs(run: Run) -> Iterator[str]:
    """Yield a line with the number and total size of the input files; nothing if the files cannot be listed here."""
    if not run.config.has_pipeline:
        return
    from data_prep.prepare import open_data_folder

    try:
        files = open_data_folder(run).list_named_files()
        size = sum(map(os.path.getsize, files))
    except (UserError, OSError):
        return
    if files:
        yield f"inputs    {_count(len(files), 'file')}, {size:,} bytes"


def note_oversubscription(config: Config) -> Iterator[str]:
    """Yield a note if the threads of the train stage outnumber the CPU cores of this machine."""
    if not config.has_pipeline:
        return
    ranks = config.stages.train.ranks
    threads = config.train.threads
    cores = len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        yield (
            f"note      {ranks} ranks of train, each with train.threads={threads}, share {cores} CPU cores, which "
            "slows all of them down; to start fewer: stages.train.tasks_per_node"
        )


class _Job(NamedTuple):
    """A job, or a job array of `tasks` tasks, that would be submitted."""

    stage: str
    heading: str
    tasks: int


class ForkPreview(NamedTuple):
    """What :func:`print_plan` needs to know about a run that would be forked from another run."""

    original: Run
    """The other run."""
    code_dir: Path
    """The directory with the code that the fork would get."""
    done_stages: Sequence[str]
    """The stages whose outputs the fork would get."""
    lines: Sequence[str]
    """Descriptions of the origin and of the changes of the config."""


def print_plan(
    config: Config,
    executor: Executor,
    console: Console,
    notes: Sequence[str] = (),
    *,
    scripts: bool = False,
    machine: str | None = None,
    corrections: Mapping[str, str] | None = None,
    fork: ForkPreview | None = None,
) -> None:
    """Print what a config would run, and whether it fits. Problems, jobs, memory and layout come first, on one screen.

    Args:
        config: the config.
        executor: where the stages would run; not `auto`.
        console: where to print.
        notes: more lines about the run, such as the size of its inputs.
        scripts: whether to also print the resolved config and, for Slurm, the sbatch scripts.
        machine: as in `check_memory`.
        corrections: descriptions of the changes that submitting this config would make to an existing run, by key.
        fork: the fork that would be created; None for a run without origin.

    Raises:
        UserError: if a script cannot be written, or `machine` is unknown.
    """
    verdicts = check_memory(config, executor, machine) if config.has_pipeline else []
    warning = describe_exposed_setup(config)
    config = Config.model_validate(mask_secrets(config.model_dump(mode="json")))
    run = Run(config.run.root / config.run.name)
    sweep_points = config.sweep.points() if config.sweep else []
    point_count = len(sweep_points)
    search_lines: list[str] = []
    if config.sweep is not None and config.sweep.search is not None:
        point_count = min(config.sweep.trials_at_once, config.sweep.point_count)  # the first trials
        search_lines = list(_describe_search(config, config.sweep.search))
    # `run` has the config before the corrections, so it is unknown which stages are done with the new config
    done_stages = [] if corrections else list(_list_done_stages(run))
    if fork is not None:
        done_stages = list(fork.done_stages)
    jobs = [job for job in _list_jobs(config, point_count) if job.stage not in done_stages]
    on_slurm = executor == "slurm"
    # the changes that this command would make to an existing run, or else the changes that were made before
    changes = [f"corrects  {key}: {change}" for key, change in (corrections or {}).items()]
    if not corrections and run.config_file.exists():
        changes = [line for line in (run.describe_changes(),) if line]
    if fork is not None:
        changes = list(fork.lines)
    problems = [f"{verdict.kind} memory: {verdict.message}" for verdict in verdicts if not verdict.fits]
    if on_slurm:
        problems += [*_check_controller(), *_check_time_limits(config)]
    problems += [
        message.removeprefix("warning: ") for message in (warning, describe_replacement_risk(run.path)) if message
    ]
    point_lines = [
        f"point {number:03} {', '.join(f'{key} {value}' for key, value in point.items())}"
        for number, point in enumerate(sweep_points)
    ]
    lines = [
        f"run       {run.name}" + (" (exists)" if run.config_file.exists() else ""),
        *limit_lines(changes, 5),
        f"verdict   {_count(len(problems), 'problem') if problems else 'no problem found'}",
        *(f"problem   {problem}" for problem in limit_lines(problems)),
        *_describe_jobs(config, executor, jobs),
        *(f"memory    {verdict.kind}: {verdict.message}" for verdict in verdicts if verdict.fits),
        *([f"done      {', '.join(done_stages)}"] if done_stages else []),
        *(_describe_training(config, run, fork) if config.has_pipeline else _describe_commands(config)),
        *(
            line if line.startswith("point ") else f"          {line} points"  # the last line may be `and N more`
            for line in limit_lines(point_lines, _MAX_POINTS_SHOWN)
        ),
        *search_lines,
        *notes,
        "",
        *describe_stages(
            config, point_count, on_slurm, [stage for stage in config.active_stages if stage not in done_stages]
        ),
    ]
    console.print("\n".join(lines), soft_wrap=True)
    if not scripts:
        console.print(f"\nconfig{' and sbatch scripts' if on_slurm else ''}: --scripts", soft_wrap=True)
        return
    lines = ["", "# ---- config, resolved", dump_config(config).rstrip()]
    if on_slurm:
        for job in jobs:
            lines += [
                "",
                f"# ---- on Slurm: {job.heading}",
                render_batch_script(run, config, job.stage, job.tasks).rstrip(),
            ]
    else:
        lines += ["", "no sbatch scripts, because no job goes to Slurm; --executor slurm prints them"]
    console.print("\n".join(lines), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    """Return a number and a noun: `1 job`, `3 jobs`, `2 batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _list_jobs(config: Config, point_count: int) -> Iterator[_Job]:
    """Yield the jobs of a config. `point_count` is the number of points of its sweep; 0 if there is no sweep."""
    for stage, definition in config.active_stages.items():
        tasks = (point_count or 1) if definition.is_per_point else config.stages.get_resources(stage).array_tasks
        yield _Job(stage, stage, tasks)
        if definition.is_array and tasks > 1:
            yield _Job(stage, f"{stage}, after the array: completes what the array left, and validates", 1)
        elif definition.is_training and not point_count and not config.site.requeue:
            yield _Job(stage, f"{stage}, its successor: continues the training if it does not finish", 1)


def _list_done_stages(run: Run) -> Iterator[str]:
    """Yield the stages of a run that are done; none if the run does not exist yet.

    For a sweep, only the stages that its points share are examined.
    """
    for stage in stages.list_run_stages(run) if run.config_file.exists() else ():
        if stages.describe_missing_outputs_quickly(run, stage) is None:
            yield stage


def _check_controller() -> Iterator[str]:
    """Yield a problem if jobs cannot be submitted from this machine now."""
    try:
        if not is_slurm_responding():
            yield "submitting would fail here: no Slurm controller responds (scontrol ping)"
    except UserError as error:
        yield f"submitting would fail now: {error}"


def _check_time_limits(config: Config) -> Iterator[str]:
    """Yield a problem for each stage whose time limit is too short to start and save."""
    for stage in config.active_stages:
        if problem := describe_short_time_limit(config, stage):
            yield f"stages.{stage}.time: {config.stages.get_resources(stage).time} is {problem}"


def _describe_jobs(config: Config, executor: Executor, jobs: Sequence[_Job]) -> Iterator[str]:
    """Yield a line with the number of jobs, the nodes and GPUs of the largest job, and the most hours of all jobs.

    If there are no jobs, or the stages do not run on Slurm, the line only says this.
    """
    if not jobs:
        yield "jobs      none: all stages are done"
        return
    if executor != "slurm":
        place = "in this allocation" if executor == "allocation" else "on this machine"
        remaining = _count(len({job.stage for job in jobs}), "stage")
        yield f"jobs      none on Slurm: {remaining} {place}, one after the other"
        return
    nodes_by_stage = {job.stage: config.stages.get_resources(job.stage).max_requested_nodes for job in jobs}
    max_nodes = max(nodes_by_stage.values())
    max_gpus = max(nodes * config.resolve_site(stage).gpus_per_node for stage, nodes in nodes_by_stage.items())
    hours = {"node": 0.0, "GPU": 0.0}
    for stage, heading, tasks in jobs:
        if stage == heading:  # the other jobs only complete what the first job of the stage has left
            node_hours = (
                tasks * nodes_by_stage[stage] * parse_time_limit(config.stages.get_resources(stage).time) / 3600
            )
            hours["node"] += node_hours
            hours["GPU"] += node_hours * config.resolve_site(stage).gpus_per_node
    task_count = sum(job.tasks for job in jobs)
    count = f"{_count(len(jobs), 'Slurm job')}"
    if task_count > len(jobs):
        count += f", {task_count:,} with the tasks of arrays"
    largest = f"the largest {_count(max_nodes, 'node')}" + (f" and {_count(max_gpus, 'GPU')}" if max_gpus else "")
    max_hours = ", ".join(f"{number:,.1f} {unit}-hours" for unit, number in hours.items() if number)
    yield f"jobs      {count}; {largest}; {max_hours} at most, if each runs once"


def _describe_training(config: Config, run: Run, fork: ForkPreview | None) -> Iterator[str]:
    """Yield a line each about the data, the model, the batches and the layout of the train stage."""
    model_folders = [Path.cwd(), CODE_ROOT]
    data_dir = run.data_dir
    if fork is not None:
        model_folders = [fork.code_dir]
        data_dir = fork.original.data_dir
    train = config.train
    model = config.model
    custom_model = resolve_user_model(config, model_folders)
    sources = ", ".join(limit_lines(config.data.sources, 3))
    if config.data.mixture is not None:
        sources = str(config.data.mixture)
    first, *later = config.length_phases
    contents = f"sequences of {first.length} tokens"
    contents += "".join(f", {phase.length} from step {phase.from_step}" for phase in later)
    tokens = " to ".join(f"{train.global_batch * phase.length:,}" for phase in (first, *later[-1:]))
    unit = f"sequences ({tokens} tokens)"
    architecture = model.describe()
    if custom_model is not None:
        contents = ", ".join(custom_model.arrays)
        unit = "samples"
        architecture = f"{custom_model.target} ({custom_model.root})"
        if custom_model.has_dataset:
            has_source = config.data.sources != type(config.data)().sources
            sources = f"dataset of {custom_model.target}" + (f", {sources}" if has_source else "")
    layout = resolve_layout(config)
    nodes = config.stages.train.max_nodes
    split = f"{_count(layout.dp, 'replica')} × {_count(layout.micro_batches, 'micro-batch')} of {train.micro_batch}"
    yield f"data      {sources}: {contents}"
    yield f"model     {architecture}, {train.precision}"
    yield f"training  {format_training_length(config, data_dir)} of {train.global_batch} {unit}: {split}"
    yield f"layout    {_count(layout.world_size, 'rank')} on {_count(nodes, 'node')}: {describe_layout(layout)}"


def _describe_search(config: Config, search: SearchConfig) -> Iterator[str]:
    """Yield lines with the trials, the rungs and the space of a search."""
    optuna = search.optuna
    rungs = compute_rungs(search, config.train.steps or 1, config.train.evaluate_every)
    at_once = config.sweep.trials_at_once if config.sweep is not None else 1
    yield (
        f"search    {_count(optuna.trials, 'trial')} by {optuna.sampler}, {at_once} at once; rungs at steps "
        f"{', '.join(map(str, rungs))}; lowest {search.metric} wins"
    )
    for key, values in search.space.items():
        if isinstance(values, Distribution):
            yield f"          {key} from {values.low:g} to {values.high:g} ({values.type}, {values.scale})"
        else:
            yield f"          {key}: {', '.join(map(str, values))}"


def _describe_commands(config: Config) -> Iterator[str]:
    """Yield a line with the command of each stage that has one."""
    for name, definition in config.active_stages.items():
        if definition.command is not None:
            yield f"{name:9} {definition.command.command}"


def describe_stages(
    config: Config, point_count: int, on_slurm: bool, selected_stages: Container[str] | None = None
) -> Iterator[str]:
    """Yield a line for each stage: its processes, time limit, parent stages, and what it requests from Slurm.

    Args:
        config: the config.
        point_count: the number of points of the sweep; 0 if there is no sweep.
        on_slurm: whether the stages run on Slurm.
        selected_stages: the stages to describe; None for all.
    """
    for stage, definition in config.active_stages.items():
        if selected_stages is not None and stage not in selected_stages:
            continue
        resources = config.stages.get_resources(stage)
        site = config.resolve_site(stage)
        nodes = ""
        if resources.max_nodes > 1:
            is_elastic = resources.min_nodes < resources.max_nodes
            nodes = f"{resources.min_nodes} to " if is_elastic else ""
            nodes += f"{resources.max_nodes} × {resources.processes_per_node} = {'at most ' if is_elastic else ''}"
        spares = f" and {_count(resources.spare_nodes, 'spare node')}" if resources.spare_nodes else ""
        parents = "".join(f", after {parent}" for parent in definition.depends_on)
        repetition = f", for each of {point_count} points" if point_count and definition.is_per_point else ""
        requests = ""
        if on_slurm and (options := _list_slurm_options(site)):
            requests = f"; requests {', '.join(limit_lines(options, 12))}"
        processes = f"{resources.ranks} process{'es' if resources.ranks > 1 else ''}"
        yield f"{stage:9} {nodes}{processes}{spares}, {resources.time}{parents}{repetition}{requests}"


def _list_slurm_options(site: SiteConfig) -> list[str]:
    """Return the options that a stage's jobs request from Slurm, each as `KEY VALUE`."""
    keys = ["partition", "account", "qos", "constraint", "cpus_per_task", "mem_gb"]
    if site.gpus_per_node:
        keys += ["gpus_per_node", "gpu_type"]
    values = {key: value for key in keys if (value := getattr(site, key)) not in (None, 0, "")}
    options = [f"{key} {value:g}" if key == "mem_gb" else f"{key} {value}" for key, value in values.items()]
    # in `sbatch`, a stage sets an option to false in order to omit an option of `site`
    return options + [f"{key} {value}" for key, value in site.sbatch.items() if value is not False]
