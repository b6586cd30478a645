"""Faults from inside a rank; Python imports this by itself where the folder is on PYTHONPATH.

`CHAOS` names a folder. `inject.json` in it is the next fault: {"kind", "rank", "step"?, "phase"?}; the rank that
commits it removes the file first, so that it happens once. `slow` holds seconds that each step takes longer.
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
RANK = int(os.environ.get("SLURM_PROCID", os.environ.get("SLUICE_RANK", "0")))


def due(kind, **wanted):
    """Whether this rank is to commit a fault of this kind now; it is then forgotten."""
    try:
        fault = json.loads((FOLDER / "inject.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    if fault["kind"] != kind or fault["rank"] != RANK or any(fault.get(k) != v for k, v in wanted.items()):
        return False
    (FOLDER / "inject.json").rename(FOLDER / "done.json")
    return True


def die(phase):
    if due("die_in_save", phase=phase):
        os.kill(os.getpid(), signal.SIGKILL)


def patch_trainer(module):
    step_of_trainer = module.Trainer.step

    def step(self, number, tokens):
        time.sleep(float((FOLDER / "slow").read_text()))
        if due("sleep"):
            time.sleep(3600)
        module.Trainer.poisoned = due("nan")
        return step_of_trainer(self, number, tokens)

    module.Trainer.step = step


def patch_model(module):
    cross_entropy_sum = module.cross_entropy_sum

    def poisoned_cross_entropy_sum(*arguments):
        loss = cross_entropy_sum(*arguments)
        trainer = getattr(sys.modules.get("pipeline.train.trainer"), "Trainer", None)
        return loss * float("nan") if getattr(trainer, "poisoned", False) else loss

    module.cross_entropy_sum = poisoned_cross_entropy_sum


def patch_checkpoint(module):
    save, write, hash_files, commit = (
        module.Checkpointer.save, module.dcp.save, module._hash_own_files, module.Checkpointer._commit,
    )  # fmt: skip

    def dying_save(self, *arguments, **options):
        die("staging")
        return save(self, *arguments, **options)

    def dying_write(*arguments, **options):
        die("writing")
        return write(*arguments, **options)

    def dying_hash(*arguments):
        die("hashing")
        return hash_files(*arguments)

    def dying_commit(self, *arguments):
        die("before the rename")
        commit(self, *arguments)
        die("after the rename")

    module.Checkpointer.save, module._hash_own_files = dying_save, dying_hash
    module.dcp.save, module.Checkpointer._commit = dying_write, dying_commit


def patch_run(module):
    if SKEWED:
        true_timestamp = module.utc_timestamp
        module.utc_timestamp = lambda: (datetime.fromisoformat(true_timestamp()) + timedelta(hours=1)).strftime(
            "%FT%T.000Z"
        )


PATCHES = {
    "pipeline.run.directory": patch_run,
    "pipeline.model.decoder": patch_model,
    "pipeline.checkpoint.checkpointer": patch_checkpoint,
    "pipeline.train.trainer": patch_trainer,
}


class Finder(importlib.abc.MetaPathFinder):
    """Lets the others find a module, and patches it once it was executed."""

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


if FOLDER.is_dir() and "pipeline" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
    SKEWED = due("skew")
    if SKEWED:
        true_time = time.time
        time.time = lambda: true_time() + 3600
