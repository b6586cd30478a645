"""What a stage's module offers, and what the rows of the table (pipeline/config/stages.py) mean for a run.

The module is light: importing it loads no torch, numpy or h5py, so that the login node can ask it questions; heavy
imports stand inside `main`. It has:

    def missing(run) -> str | None                why the stage is not done; None when its outputs validate
    def progress(run) -> Progress                 how far it is
    def main(run, place, options, flag) -> ExitCode   do it: in every rank, from wherever the run stands
    def missing_at_a_glance(run) -> str | None    optional: `missing` for whoever only shows it, and asks few files
    def lacks(run) -> str | None                  optional: which file is gone that it would read, in words, the way
                                                  out with them, where it has not begun
    def note(run) -> str | None                   optional: what a person should know who goes on with what is done
    def look(run) -> None                         optional: raise UserError for inputs that `main` would refuse at
                                                  first sight, before the run is made

A stage is done when its outputs validate, never because a job exited 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.config.stages import STAGES
from pipeline.parallel.mesh import count_usable_nodes
from pipeline.run.directory import Run


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    words: str
    """In a phrase."""
    done: int = 0
    """So many of what it counts (units, steps)."""
    total: int = 0
    """Of so many; 0 where it counts nothing."""
    running: str = "running"
    """In a phrase, while it runs."""
    loss: str = ""
    """Of its last step."""
    left_s: float | None = None
    """Seconds that it still takes, at the pace of its last step."""


class Work(Protocol):
    """What a stage's module offers."""

    def missing(self, run: Run) -> str | None:
        """Why the stage is not done; None when its outputs validate (sizes; hashes are checked by its users)."""

    def progress(self, run: Run) -> Progress:
        """How far it is."""

    def main(self, run: Run, place: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
        """Do the stage's work as rank `place.rank` of `place.world_size`; leave soon once `flag` is set."""


def load(stage: str) -> Work:
    """The module of a stage. Raises UserError for a name that is none."""
    if stage not in STAGES:
        raise UserError(f"{stage}: no such stage; there are {', '.join(STAGES)}")
    return cast(Work, importlib.import_module(STAGES[stage].module))


def own_stages(run: Run) -> list[str]:
    """The stages of this run itself: those of a sweep end where its points begin."""
    return [
        stage for stage, row in run.config.active_stages.items() if run.config.sweep is None or not row.is_per_point
    ]


def point_stages() -> list[str]:
    """The stages that each point of a sweep has."""
    return [stage for stage, row in STAGES.items() if row.is_per_point]


def refuse_inputs(run: Run) -> None:
    """Raise UserError where a stage of the run, made or not, has yet to be done and would refuse its inputs."""
    for stage in own_stages(run):
        work = load(stage)
        if (look := getattr(work, "look", None)) is not None and work.missing(run) is not None:
            look(run)


def notes(run: Run) -> list[str]:
    """What a person should know who goes on with the run."""
    asked = [getattr(load(stage), "note", None) for stage in own_stages(run)]
    return [told for note in asked if note and (told := note(run))]


def ranks(run: Run, stage: str, granted: int | None = None) -> int:
    """How many processes to start for a stage, on `granted` nodes where somebody counted them."""
    wanted = run.config.stages.get_resources(stage)
    if granted is None or not STAGES[stage].is_distributed:
        return wanted.ranks
    fewest, most = wanted.min_nodes, wanted.max_nodes
    nodes = count_usable_nodes(run.config, granted) if STAGES[stage].is_training else max(fewest, min(granted, most))
    return nodes * wanted.processes_per_node


def task_of(stage: str, place: RankInfo) -> int | None:
    """In a stage's own array, whose tasks are one rank each of the same run: which one this is."""
    return place.array[0] if STAGES[stage].is_array and place.array else None
