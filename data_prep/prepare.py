"""The prepare stage: decide in one process what the shard stage builds.

For text, the stage writes the tokenizer and the work units. For a custom model, it lists the files of samples, or
describes the dataset of the user's module.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.data_folder import PACKAGE, DataFolder
from data_prep.dataset_folder import DatasetFolder
from data_prep.mixture_folder import MixtureFolder, open_source_folder
from data_prep.samples_folder import SamplesFolder
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress


def open_data_folder(run: Run, package: Path = PACKAGE) -> DataFolder[Any, Any]:
    """Return the data folder of a run: of text, of a mixture, or of a custom model's dataset or arrays.

    `package` is the folder of the code of `data_prep` that builds the files.
    """
    if run.user_model is None:
        open_folder = open_source_folder if run.config.data.mixture is None else MixtureFolder
        return open_folder(run.config.data, run.data_dir, package)
    if run.user_model.has_dataset:
        config = run.sweep_or_self.config
        return DatasetFolder(
            config.data,
            run.data_dir,
            package,
            run.user_model,
            config.model.all_options,
            has_epochs=config.train.epochs is not None,
            tries_dataset=config.site.python is None and config.site.container is None,
        )
    return SamplesFolder(run.config.data, run.data_dir, package, run.user_model)


def open_finished_data_folder(run: Run) -> DataFolder[Any, Any]:
    """Return the data folder of a run for reading only. Its keys are computed from the code in the run directory."""
    return open_data_folder(run, run.code_dir / "data_prep")


def print_log(text: str) -> None:
    """Print a message to the log of the stage."""
    print(text, flush=True)


def describe_missing_outputs(run: Run) -> str | None:
    """Return why the prepare stage is not done; None if its outputs are valid."""
    return open_finished_data_folder(run).find_prepare_problem()


def describe_missing_outputs_quickly(run: Run) -> str | None:
    """Return why the prepare stage is not done; None if its outputs are valid. Changes of inputs are not checked."""
    return open_finished_data_folder(run).find_prepare_problem(check_inputs=False)


def progress(run: Run) -> Progress:
    """Return a description of the outputs, or `-` if the stage is not done."""
    folder = open_finished_data_folder(run)
    is_done = folder.find_prepare_problem(check_inputs=False) is None
    return Progress(folder.describe_prepared() if is_done else "-")


def check_inputs(run: Run) -> None:
    """Raise UserError if a quick check shows that the inputs cannot be used."""
    open_data_folder(run).check_inputs()


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Run the prepare stage. Only rank 0 does the work."""
    gc.enable()  # The program that starts the stages disables garbage collection.
    flag.exit_on_signal()  # The process may end at any time, because all files are written atomically.
    if rank_info.rank == 0:
        open_data_folder(run).prepare(print_log)
    return ExitCode.DONE
