"""The shard stage: write documents to HDF5 shards in several Slurm array tasks.

Work unit `u` belongs to array task `u % tasks`, so the tasks need no process group. The task that finds all units
complete writes the manifest. Two tasks may do this at the same time, because they write the same bytes and rename the
file atomically. For a custom model, a work unit is one file of samples, which the task hashes or unpacks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import suppress

from data_prep.prepare import open_data_folder, open_finished_data_folder, print_log
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, InputError, UserError
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress

MAX_INPUTS_CHECKED = 100
"""Maximum number of inputs, evenly spaced in the list of all inputs, that are checked before the stage starts."""
_MAX_INPUTS_COMPARED = 1000
"""Maximum number of inputs, evenly spaced, that `resume` compares with the inputs from which the shards were made."""


def describe_missing_outputs(run: Run) -> str | None:
    """Return why the shard stage is not done; None if its manifest is valid and all files have the right sizes."""
    return open_finished_data_folder(run).find_shard_problem()


def missing_inputs(run: Run) -> str | None:
    """Return which input is missing or has changed, according to a check of some inputs; None if no problem is found.

    If `manifest.json` exists, the inputs are not needed, so the shards are checked instead.
    """
    folder = open_finished_data_folder(run)
    # The prepare stage reports InputErrors itself. An OSError occurs if the user who runs this check may not read a
    # file.
    with suppress(InputError, OSError):
        if (folder.path / "manifest.json").exists():
            return folder.find_shard_problem()
        checked_inputs = folder.inputs[:: len(folder.inputs) // MAX_INPUTS_CHECKED + 1]
        return next(filter(None, (source.find_problem() for source in checked_inputs)), None)
    return None


def resume_note(run: Run) -> str | None:
    """Return a note if files of `data.source` are new or have changed since the shards were made; otherwise None.

    If the shards are incomplete, return None, because the prepare stage then lists the inputs again. Removed files are
    ignored, because finished shards do not need them. All new files are found. Of the files that the shards were made
    from, at most `_MAX_INPUTS_COMPARED` are compared.
    """
    folder = open_finished_data_folder(run)
    with suppress(UserError, OSError):
        if folder.find_shard_problem() is not None:
            return None
        inputs = folder.inputs
        compared_inputs = inputs[:: len(inputs) // _MAX_INPUTS_COMPARED + 1]
        changed_paths = {
            source.path for source in compared_inputs if os.path.exists(source.path) and source.find_problem()
        }
        other_input_paths = {source.path for source in inputs} - changed_paths
        new_or_changed_paths = sorted({*changed_paths, *folder.list_named_files()} - other_input_paths)
        if new_or_changed_paths:
            count = f"{len(new_or_changed_paths):,}"
            if len(compared_inputs) < len(inputs):
                count = f"at least {count}"
            return (
                f"note: {new_or_changed_paths[0]} ({count} in all) is new or has changed since the shards were made. "
                "This run keeps its shards; to use the new data, start a run with another run.name"
            )
    return None


def progress(run: Run) -> Progress:
    """Return how many work units are finished, and the estimated remaining time."""
    folder = open_finished_data_folder(run)
    done, total, remaining_s = folder.measure_progress()
    counts = f"{done}/{total} units"
    return Progress(counts + folder.describe_result(), done, total, counts, remaining_s=remaining_s)


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Build the work units of this array task. The last task to finish writes the manifest."""
    gc.enable()  # The program that starts the stages disables garbage collection.
    flag.exit_on_signal()  # The process may end at any time, because all files are written atomically.
    folder = open_data_folder(run)
    task, tasks = rank_info.array or (rank_info.rank, rank_info.world_size)
    folder.shard(task, tasks, print_log, run.config.site.stripe)
    # `finalize` checks whether a shard has enough tokens for a sample of this length.
    folder.sequence_length = run.config.data.sequence_length
    folder.finalize(print_log)
    return ExitCode.DONE
