"""The stages of a run, in order, and how to know that one is done.

Each stage is one module here, and light: importing it loads no torch, numpy or h5py, so that the login node
can ask it questions. Heavy imports stand inside `main`. A stage module has:

    NEEDS: tuple[str, ...]                 the stages whose outputs it reads
    def missing(run) -> str | None         why the stage is not done; None when its outputs validate
    def progress(run) -> str               one short phrase for `status`
    def main(run, place, options, flag) -> Exit   do it: in every rank, from wherever the run stands

A stage is done when its outputs validate, never because a job exited 0. To add one: write the module, add
its name to STAGES (and a section to `StagesConfig` in pipeline/config/stages.py for its resources).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from pipeline.base.errors import Exit, UserError
from pipeline.base.place import Place
from pipeline.base.signals import StopFlag
from pipeline.config.layout import usable_nodes
from pipeline.run.directory import Run

STAGES = ("prepare", "shard", "train", "evaluate")


class Stage(Protocol):
    """What a stage module offers."""

    NEEDS: tuple[str, ...]

    def missing(self, run: Run) -> str | None:
        """Why the stage is not done; None when its outputs validate (sizes; hashes are checked by its users)."""

    def progress(self, run: Run) -> str:
        """How far it is, in a few words."""

    def main(self, run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
        """Do the stage's work as rank `place.rank` of `place.world_size`; leave soon once `flag` is set."""


def load(name: str) -> Stage:
    """The stage called `name`. Raises UserError for a name that is none."""
    if name not in STAGES:
        raise UserError(f"{name}: no such stage; there are {', '.join(STAGES)}")
    module = {"train": "pipeline.train.train_stage", "evaluate": "pipeline.evaluate.evaluate_stage"}
    return cast(Stage, importlib.import_module(module.get(name, f"data_prep.{name}")))


def ranks(run: Run, stage: str, granted: int | None = None) -> int:
    """How many processes to start for a stage, on `granted` nodes where somebody counted them."""
    wanted = getattr(run.config.stages, stage)
    if granted is None or stage not in ("train", "evaluate"):
        return int(wanted.ranks)
    nodes = (
        usable_nodes(run.config, granted)
        if stage == "train"
        else max(wanted.fewest_nodes, min(granted, wanted.most_nodes))
    )
    return int(nodes * wanted.tasks_per_node)


def number(stage: str, place: Place) -> int:
    """The number that the log and the error report of a process bear: its rank, or its task in the array of shard.

    Each task of that array is rank 0 of its own job.
    """
    return place.array[0] if stage == "shard" and place.array else place.rank
