"""Stage shard: documents to HDF5 shards, several tasks at once, each unit written by one task.

The tasks need no process group: unit `u` belongs to task `u % tasks`, and whichever task finds every unit
written validates them all and writes the manifest (two may do so at once: same bytes, atomic rename). For a model of
the user's own a unit is one file of its samples, to be hashed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import suppress

from data_prep.prepare import log, open_data_folder, open_finished_data_folder
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, InputError, UserError
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress

MOST_ASKED = 100


def missing_outputs(run: Run) -> str | None:
    """Why shard is not done; None when the manifest and every shard validate (by size)."""
    return open_finished_data_folder(run).find_shard_problem()


def missing_inputs(run: Run) -> str | None:
    """Which file it would not find as it was, where it has not begun: of its inputs some are asked, spread over all."""
    folder = open_finished_data_folder(run)
    with suppress(InputError, OSError):  # the stage before says why; or it is another one's, who looks here
        if (folder.path / "manifest.json").exists():
            return folder.find_shard_problem()
        some = folder.inputs[:: len(folder.inputs) // MOST_ASKED + 1]
        return next(filter(None, (one.find_problem() for one in some)), None)
    return None


def resume_note(run: Run) -> str | None:
    """What the source has that finished shards were not made of; None for what is gone: nobody needs it any more."""
    folder = open_finished_data_folder(run)
    with suppress(UserError, OSError):
        if folder.find_shard_problem() is None:
            known = folder.inputs
            some = [one for one in known[:: len(known) // 1000 + 1] if os.path.exists(one.path)]
            changed = [one.path for one in some if one.find_problem()]
            if changed := sorted(
                {*changed, *folder.list_named_files()} - {one.path for one in known if one.path not in changed}
            ):
                return (
                    f"note: {changed[0]} ({len(changed):,} in all) is new or has changed since the shards were made. "
                    "This run keeps its shards; for what is new start one under another run.name"
                )
    return None


def progress(run: Run) -> Progress:
    """How far it is."""
    folder = open_finished_data_folder(run)
    done, total, left_s = folder.progress()
    words = f"{done}/{total} units"
    return Progress(words + folder.describe_result(), done, total, words, remaining_s=left_s)


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Shard this task's units; the last task to finish writes the manifest."""
    gc.enable()
    flag.exit_on_signal()
    folder = open_data_folder(run)
    task, tasks = rank_info.array or (rank_info.rank, rank_info.world_size)
    folder.shard(task, tasks, log, run.config.site.stripe)
    folder.length = run.config.data.sequence_length
    folder.finalize(log)
    return ExitCode.DONE
