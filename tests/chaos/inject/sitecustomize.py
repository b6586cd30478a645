"""Cause faults inside a rank. Python imports this file automatically if its folder is in PYTHONPATH.

A node agent patches its modules before it forks ranks. Therefore, functions find out at each call which rank this is.

The environment variable `CHAOS` is the path of a folder. Its file `inject.json` requests the next fault. The file
contains an object with `kind`, `rank` and, for a kill in a save, `phase`. The rank renames the file before it causes
the fault, so that the fault happens only once. The file `delay` contains the seconds that are added to each step.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

FOLDER = Path(os.environ.get("CHAOS", "/nonexistent"))


def get_rank():
    """Return the rank of this process."""
    return int(os.environ.get("SLURM_PROCID", os.environ.get("SLUICE_RANK", "0")))


def take_fault(kind, **details):
    """Return True if this rank must cause a fault of this kind with these details now. Also remove the request."""
    try:
        fault = json.loads((FOLDER / "inject.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    if fault["kind"] != kind or fault["rank"] != get_rank() or any(fault.get(k) != v for k, v in details.items()):
        return False
    (FOLDER / "inject.json").rename(FOLDER / "done.json")
    return True


def die_if_requested(phase):
    """Kill this process if a kill in this phase of a save is requested."""
    if take_fault("die_in_save", phase=phase):
        os.kill(os.getpid(), signal.SIGKILL)


def patch_trainer(module):
    """Delay each step. If a fault is requested, let the step hang, or let `patch_model` replace the loss by NaN."""
    trainer_step = module.Trainer.step

    def step(self, number, tokens):
        time.sleep(float((FOLDER / "delay").read_text()))
        if take_fault("sleep"):
            time.sleep(3600)
        module.Trainer.injects_nan_loss = take_fault("nan")
        return trainer_step(self, number, tokens)

    module.Trainer.step = step


def patch_model(module):
    """Replace the loss by NaN in a step for which `patch_trainer` has found a request."""
    cross_entropy_sum = module.cross_entropy_sum

    def cross_entropy_sum_or_nan(*arguments):
        loss = cross_entropy_sum(*arguments)
        trainer_class = getattr(sys.modules.get("pipeline.train.trainer"), "Trainer", None)
        return loss * float("nan") if getattr(trainer_class, "injects_nan_loss", False) else loss

    module.cross_entropy_sum = cross_entropy_sum_or_nan


def patch_checkpoint(module):
    """Kill the process before the copy of a save if this kill is requested."""
    save = module.Checkpointer.save

    def save_or_die(self, *arguments, **options):
        die_if_requested("staging")
        return save(self, *arguments, **options)

    module.Checkpointer.save = save_or_die


def patch_writer(module):
    """Kill the process that writes a checkpoint, a rank or its saver, before a phase or after the rename if requested.

    If a saver is killed, its rank fails.
    """
    write = module.dcp.save
    hash_files = module._hash_files_of_rank
    commit = module.CheckpointWriter._commit

    def write_or_die(*arguments, **options):
        die_if_requested("writing")
        return write(*arguments, **options)

    def hash_or_die(*arguments):
        die_if_requested("hashing")
        return hash_files(*arguments)

    def commit_or_die(self, *arguments):
        die_if_requested("before the rename")
        commit(self, *arguments)
        die_if_requested("after the rename")

    module.dcp.save = write_or_die
    module._hash_files_of_rank = hash_or_die
    module.CheckpointWriter._commit = commit_or_die


def patch_events(module):
    """Change the times of events by an hour if the clock of this rank is skewed."""
    true_timestamp = module.utc_timestamp

    def timestamp():
        hours = timedelta(hours=1 if clock["is_skewed"] else 0)
        return (
            (datetime.fromisoformat(true_timestamp()) + hours).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )

    module.utc_timestamp = timestamp


clock = {"is_skewed": False}


def skew_clock_if_requested(module=None):
    """Set the clock of this rank an hour ahead if that is requested. Call this at the start of a rank."""
    if take_fault("skew"):
        clock["is_skewed"] = True
        true_time = time.time
        time.time = lambda: true_time() + 3600


PATCHES = {
    "pipeline.run.events": patch_events,
    "pipeline.model.decoder": patch_model,
    "pipeline.checkpoint.checkpointer": patch_checkpoint,
    "pipeline.checkpoint.writer": patch_writer,
    "pipeline.train.trainer": patch_trainer,
    "pipeline.__main__": skew_clock_if_requested,  # a forked rank imports this module
}


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Patch the modules in PATCHES after their import. The other finders find these modules."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if FOLDER.is_dir() and {"pipeline", "slurm.agent"}.intersection(sys.orig_argv):
    sys.meta_path.insert(0, PatchingFinder())
    if "pipeline" in sys.orig_argv:  # this process is a rank without an agent
        skew_clock_if_requested()
