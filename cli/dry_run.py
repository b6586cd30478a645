"""`--dry-run`: what a config would run, printed before anything is made.

The answer comes first and fits on a screen: problems, jobs, what they ask of Slurm, memory, layout. With `--scripts`,
the resolved config and the sbatch scripts follow.

What is printed is meant to be pasted into tickets and chats, so what may be secret is masked
(pipeline/config/masking.py). The scripts that are submitted are the same, unmasked. What cannot
work is refused before (cli/submission_checks.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from cli.submission_checks import short_time
from pipeline.base.errors import UserError, limit_lines
from pipeline.base.ownership import replaceable
from pipeline.config.masking import exposed, masked
from pipeline.config.read import dump_config
from pipeline.config.sections import Config
from pipeline.config.types import parse_time
from pipeline.config.user_model import found_for
from pipeline.data.manifest import steps_words
from pipeline.parallel.mesh import describe_layout, resolve_layout
from pipeline.run import stages
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from planning.memory_check import check_memory
from slurm.query.job_states import is_slurm_responding
from slurm.submit.executor import Executor
from slurm.submit.sbatch import render_batch_script

_MOST_POINTS = 3
"""Points of a sweep that are shown."""


class _Job(NamedTuple):
    """A job, or an array of `tasks`, that submitting would queue."""

    stage: str
    heading: str
    tasks: int


def print_plan(
    config: Config,
    executor: Executor,
    console: Console,
    notes: Sequence[str] = (),
    *,
    scripts: bool = False,
    machine: str | None = None,
    corrections: Mapping[str, str] | None = None,
) -> None:
    """Print what a config would run, and whether it fits.

    Args:
        config: The config.
        executor: Where its jobs would run; not `auto`.
        console: Where to print.
        notes: More lines about the run, such as the size of its inputs.
        scripts: Whether to print the resolved config and, for Slurm, the sbatch scripts after it.
        machine: As in `memory_verdicts`.
        corrections: What the config corrects of a run that exists, in words by keys.

    Raises:
        UserError: A script cannot be written, or there is no such `machine`.
    """
    verdicts, warning = check_memory(config, executor, machine), exposed(config)
    config = Config.model_validate(masked(config.model_dump(mode="json")))
    run, points = Run(config.run.root / config.run.name), config.sweep.points() if config.sweep else []
    done = [] if corrections else list(_done(run))
    jobs, on_slurm = [job for job in _jobs(config, len(points)) if job.stage not in done], executor == "slurm"
    changes = [f"corrects  {key}: {words}" for key, words in (corrections or {}).items()]
    if not corrections and run.config_file.exists():
        changes = [line for line in (run.describe_changes(),) if line]
    problems = [f"{one.kind} memory: {one.words}" for one in verdicts if not one.fits]
    problems += [*_no_controller(), *_short_times(config)] if on_slurm else []
    problems += [words.removeprefix("warning: ") for words in (warning, replaceable(run.path)) if words]
    shown = limit_lines(
        [f"point {n:03} {', '.join(f'{k} {v}' for k, v in one.items())}" for n, one in enumerate(points)], _MOST_POINTS
    )
    lines = [
        f"run       {run.name}" + (" (exists)" if run.config_file.exists() else ""),
        *limit_lines(changes, 5),
        f"verdict   {_count(len(problems), 'problem') if problems else 'no problem found'}",
        *(f"problem   {words}" for words in limit_lines(problems)),
        *_what_is_asked(config, executor, jobs),
        *(f"memory    {one.kind}: {one.words}" for one in verdicts if one.fits),
        *([f"done      {', '.join(done)}"] if done else []),
        *_training(config, run),
        *(line if line.startswith("point ") else f"          {line} points" for line in shown),
        *notes,
        "",
        *describe_stages(config, len(points), on_slurm, [stage for stage in config.rows if stage not in done]),
    ]
    console.print("\n".join(lines), soft_wrap=True)
    if not scripts:
        console.print(f"\nconfig{' and sbatch scripts' if on_slurm else ''}: --scripts", soft_wrap=True)
        return
    below = ["", "# ---- config, resolved", dump_config(config).rstrip()]
    for job in jobs if on_slurm else ():
        below += [
            "",
            f"# ---- on Slurm: {job.heading}",
            render_batch_script(run, config, job.stage, job.tasks).rstrip(),
        ]
    if not on_slurm:
        below += ["", "no sbatch scripts, because no job goes to Slurm: --executor slurm prints them"]
    console.print("\n".join(below), soft_wrap=True)


def _count(number: int, what: str) -> str:
    """Return a number of things: `1 job`, `3 jobs`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _jobs(config: Config, points: int) -> Iterator[_Job]:
    """Yield the jobs of a config, of a sweep with so many points."""
    for stage, row in config.rows.items():
        tasks = (points or 1) if row.per_point else config.stages.of(stage).array_tasks
        yield _Job(stage, stage, tasks)
        if row.array and tasks > 1:
            yield _Job(stage, f"{stage}, behind the array: does what it left, validates", 1)
        elif row.trains and not points and not config.site.requeue:
            yield _Job(stage, f"{stage}, its successor: takes over if it does not end well", 1)


def _done(run: Run) -> Iterator[str]:
    """Yield the stages of a run that are done; of a sweep those that its points share."""
    for stage in stages.own_stages(run) if run.config_file.exists() else ():
        work = stages.load(stage)
        if getattr(work, "missing_at_a_glance", work.missing)(run) is None:
            yield stage


def _no_controller() -> Iterator[str]:
    """Yield why jobs could not be submitted from here now, if they could not."""
    try:
        if not is_slurm_responding():
            yield "submitting would be refused here: no Slurm controller answers (scontrol ping)"
    except UserError as error:
        yield f"submitting would be refused now: {error}"


def _short_times(config: Config) -> Iterator[str]:
    """Yield the stages whose time limit leaves no time to work."""
    for stage in config.rows:
        if words := short_time(config, stage):
            yield f"stages.{stage}.time: {config.stages.of(stage).time} is {words}"


def _what_is_asked(config: Config, executor: Executor, jobs: Sequence[_Job]) -> Iterator[str]:
    """Yield how many jobs there are, and the nodes, GPUs and time that they take at most."""
    if not jobs:
        yield "jobs      none: all stages are done"
        return
    if executor != "slurm":
        where = "in this allocation" if executor == "allocation" else "on this machine"
        stages_left = _count(len({job.stage for job in jobs}), "stage")
        yield f"jobs      none of Slurm's: {stages_left} {where}, one after the other"
        return
    nodes = max(config.stages.of(job.stage).most_nodes for job in jobs)
    gpus = max(config.stages.of(job.stage).most_nodes * config.site_of(job.stage).gpus_per_node for job in jobs)
    hours = {"node": 0.0, "GPU": 0.0}
    for stage, heading, tasks in jobs:
        if stage == heading:  # others take over what is left
            spent = tasks * config.stages.of(stage).most_nodes * parse_time(config.stages.of(stage).time) / 3600
            hours["node"] += spent
            hours["GPU"] += spent * config.site_of(stage).gpus_per_node
    arrays = sum(job.tasks for job in jobs)
    told = f"{_count(len(jobs), 'job')} of Slurm" + (f", {arrays:,} with the tasks of arrays" * (arrays > len(jobs)))
    largest = f"the largest {_count(nodes, 'node')}" + (f" and {_count(gpus, 'GPU')}" if gpus else "")
    most = ", ".join(f"{spent:,.1f} {unit}-hours" for unit, spent in hours.items() if spent)
    yield f"jobs      {told}; {largest}; {most} at most, if each runs once"


def _training(config: Config, run: Run) -> Iterator[str]:
    """Yield what is trained on what, and how the ranks split it."""
    train, model, length = config.train, config.model, config.data.sequence_length
    own = found_for(config, [Path.cwd(), CODE_ROOT])
    sources = ", ".join(limit_lines(config.data.sources, 3))
    if config.data.mixture is not None:
        sources = str(config.data.mixture)
    arrays, unit = f"sequences of {length} tokens", f"sequences ({train.global_batch * length:,} tokens)"
    what = f"{model.layers} layers, dim {model.dim}, {model.heads} heads ({model.num_kv_heads} kv)"
    if own is not None:
        arrays, unit, what = ", ".join(own.arrays), "samples", f"{own.target} ({own.root})"
    layout, nodes = resolve_layout(config), config.stages.train.most_nodes
    each = f"{_count(layout.dp, 'replica')} × {_count(layout.micro_batches, 'micro-batch')}".replace(
        "batchs", "batches"
    )
    yield f"data      {sources}: {arrays}"
    yield f"model     {what}, {train.precision}"
    yield f"training  {steps_words(config, run.data_dir)} of {train.global_batch} {unit}: {each} of {train.micro_batch}"
    yield f"layout    {_count(layout.world_size, 'rank')} on {_count(nodes, 'node')}: {describe_layout(layout)}"


def describe_stages(config: Config, points: int, on_slurm: bool, chosen: Container[str] | None = None) -> Iterator[str]:
    """Yield a line for each stage: its processes and time, the stages it waits for, and what it asks of Slurm.

    `chosen`: the stages to describe; None for all.
    """
    for stage, row in config.rows.items():
        if chosen is not None and stage not in chosen:
            continue
        wanted, site, nodes = config.stages.of(stage), config.site_of(stage), ""
        if wanted.most_nodes > 1:
            fewest = f"{wanted.fewest_nodes} to " if wanted.fewest_nodes < wanted.most_nodes else ""
            nodes = f"{fewest}{wanted.most_nodes} × {wanted.per_node} = {fewest and 'at most '}"
        after = "".join(f", after {parent}" for parent in row.needs)
        each = f", for each of {points} points" if points and row.per_point else ""
        keys = ["partition", "account", "qos", "constraint", "cpus_per_task", "mem_gb"]
        keys += ["gpus_per_node", "gpu_type"] if site.gpus_per_node else []
        asked = [
            f"{key} {value:g}" if key == "mem_gb" else f"{key} {value}"
            for key in keys
            if (value := getattr(site, key)) not in (None, 0, "")
        ]
        asked += [f"{key} {value}" for key, value in site.sbatch.items() if value is not False]
        asks = f"; asks for {', '.join(limit_lines(asked, 12))}" if on_slurm and asked else ""
        times = wanted.ranks
        yield f"{stage:9} {nodes}{times} process{'es' if times > 1 else ''}, {wanted.time}{after}{each}{asks}"
