"""Whatever can be known to go wrong with a config, told before anything is made or queued.

submit.py asks before it makes a run, and `--dry-run` before it prints a plan: what the one refuses the other refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.site_variables import refuse_unready
from slurm.track.sinks import refuse_missing


def rehearse(config: Config, on_slurm: bool) -> Run:
    """The run of `config`, made or not, with what the config corrects of one that is made.

    Raises UserError where it cannot be made or corrected, its inputs not be used, its jobs not be written, or a
    library for `track` is not installed.
    Inputs are looked at where they have yet to be read, and not inside a container, whose folders are its own.
    """
    run = Run.rehearse(config)
    refuse_missing(config)
    if config.site.container is None:
        stages.refuse_inputs(run)
    if on_slurm:
        from slurm.submit.sbatch import parameters

        refuse_unready(config.site, os.environ)
        for stage in run.config.rows:
            parameters(run, run.config, stage, None)
    if run.takes_code:
        run.code_notes = run.try_code()  # it may take seconds, so it comes last
    return run


def inputs(run: Run) -> Iterator[str]:
    """How many files the config of a run, made or not, names and how large they are; nothing where none can be seen."""
    try:
        files = import_module(STAGES["prepare"].module).folder_of(run).named()
        size = sum(map(os.path.getsize, files))
    except (UserError, OSError):  # they were read already, or are a container's
        return
    if files:
        yield f"inputs    {len(files):,} file{'s'[: len(files) - 1]}, {size:,} bytes"


def crowded(config: Config) -> Iterator[str]:
    """A note where a training's threads outnumber the CPU cores of this machine."""
    ranks, threads, cores = config.stages.train.ranks, config.train.threads, len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        told = f"note      train's {ranks} processes, each of train.threads={threads}, share {cores} CPU cores"
        yield f"{told} and wait for each other; fewer: stages.train.tasks_per_node"
