"""Stage shard: documents to HDF5 shards, several tasks at once, each unit written by one task.

The tasks need no process group: unit `u` belongs to task `u % tasks`, and whichever task finds every unit
written validates them all and writes the manifest (two may do so at once: same bytes, atomic rename). For a model of
the user's own a unit is one file of its samples, to be hashed.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from data_prep import arrays
from data_prep.text.state import shard_missing, shard_progress
from pipeline.base.errors import Exit
from pipeline.base.place import Place
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress


def missing(run: Run) -> str | None:
    """Why shard is not done; None when the manifest and every shard validate (by size)."""
    if run.user_model is not None:
        return arrays.shard_missing(run.config.data, run.user_model, run.data, run.code / "data_prep")
    return shard_missing(run.config.data, run.data, run.code / "data_prep")


def progress(run: Run) -> Progress:
    """How far it is."""
    done, total = counts(run)
    words = f"{done}/{total} units"
    return Progress(words, done, total, words)


def counts(run: Run) -> tuple[int, int]:
    """Units that are done, and units in all."""
    return shard_progress(run.data) if run.config.model.target is None else arrays.progress(run.data)


def main(run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
    """Shard this task's units; the last task to finish writes the manifest."""
    from data_prep.text.write import finalize, shard

    gc.enable()
    flag.leave_at_once()

    def log(text: str) -> None:
        print(text, flush=True)

    task, tasks = place.array or (place.rank, place.world_size)
    if run.user_model is not None:
        arrays.shard(run.data, task, tasks, log)
    else:
        shard(run.config.data, run.data, task, tasks, log, run.config.site.stripe)
    done, total = counts(run)
    if done == total:
        (finalize if run.user_model is None else arrays.finalize)(run.config.data, run.data, log)
    return Exit.DONE
