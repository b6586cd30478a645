"""Whatever can be known to go wrong with a config, told before anything is made or queued.

submit.py asks before it makes a run, and `--dry-run` before it prints a plan: what the one refuses the other refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

from pipeline.base.errors import UserError
from pipeline.base.ownership import replaceable
from pipeline.config.masking import exposed
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.types import parse_time
from pipeline.run import stages
from pipeline.run.directory import Run
from planning.memory_check import memory_warnings
from slurm.query.capacity import check_capacity
from slurm.query.site_variables import check_job_environment
from slurm.query.stop_causes import SIGNAL_EARLY_S
from slurm.submit.executor import Executor
from tracking.tracker import check_tracker_packages

START_S = 60
"""What a start may well take, in seconds: imports from a shared file system, a rendezvous, a checkpoint."""


def check_submission(config: Config, on_slurm: bool) -> Run:
    """The run of `config`, made or not, with what the config corrects of one that is made.

    Raises UserError where it cannot be made or corrected, its inputs not be used, its jobs not be written, or a
    library for `track` is not installed.
    Inputs are looked at where they have yet to be read, and not inside a container, whose folders are its own.
    """
    run = Run.preview(config)
    check_tracker_packages(config)
    if config.site.container is None:
        stages.refuse_inputs(run)
    if on_slurm:
        check_jobs(run)
    if run.will_copy_code:
        run.code_notes = run.check_model_code()  # it may take seconds, so it comes last
    return run


def check_jobs(run: Run) -> None:
    """Raise UserError if a job of the run, made or not, cannot be written, lacks something of this shell's, or asks for
    more than any node has."""
    from slurm.submit.sbatch import build_sbatch_parameters

    check_job_environment(run.config.site, os.environ)
    for stage in run.config.rows:
        build_sbatch_parameters(run, run.config, stage, None)
    check_capacity(run)


def short_time(config: Config, stage: str) -> str | None:
    """Return a warning if the time limit of a stage leaves too little before the signal to save; otherwise None."""
    signal_s = config.site.signal_s
    left = parse_time(config.stages.of(stage).time) - signal_s - SIGNAL_EARLY_S
    if left >= START_S:
        return None
    asked = f"asked to save {signal_s} s before the end (site.signal_s), by Slurm up to {SIGNAL_EARLY_S:.0f} s earlier"
    return f"short: {asked}; that leaves {max(0, left):.0f} s to start and to train"


def short_times(run: Run) -> Iterator[str]:
    """Yield a warning for each stage that is not done and has too short a time limit."""
    for stage in run.config.rows:
        if (words := short_time(run.config, stage)) and (run.config.sweep or stages.load(stage).missing(run)):
            yield f"warning: stages.{stage}.time: {run.config.stages.of(stage).time} is {words}"


def warnings(run: Run, executor: Executor) -> Iterator[str]:
    """Yield what the user should know when the run starts, or starts again."""
    yield from filter(None, (exposed(run.config), replaceable(run.path)))
    yield from (*stages.notes(run), *run.code_notes)
    if stages.load("train").missing(run):
        yield from memory_warnings(run.config, executor)
    if executor == "slurm":
        yield from short_times(run)
    elif executor == "local":
        yield from note_oversubscription(run.config)


def inputs(run: Run) -> Iterator[str]:
    """How many files the config of a run, made or not, names and how large they are; nothing where none can be seen."""
    try:
        files = import_module(STAGES["prepare"].module).folder_of(run).named()
        size = sum(map(os.path.getsize, files))
    except (UserError, OSError):  # they were read already, or are a container's
        return
    if files:
        yield f"inputs    {len(files):,} file{'s'[: len(files) - 1]}, {size:,} bytes"


def note_oversubscription(config: Config) -> Iterator[str]:
    """A note where a training's threads outnumber the CPU cores of this machine."""
    ranks, threads, cores = config.stages.train.ranks, config.train.threads, len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        told = f"note      train's {ranks} processes, each of train.threads={threads}, share {cores} CPU cores"
        yield f"{told} and wait for each other; fewer: stages.train.tasks_per_node"
