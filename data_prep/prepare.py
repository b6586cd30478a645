"""Stage prepare: fix what work units are made from before anything is sharded (one process).

For text that is the tokenizer and the cuts; for a model of the user's own, the files of its arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.data_folder import PACKAGE, DataFolder
from data_prep.mixture_folder import MixtureFolder, open_source_folder
from data_prep.samples_folder import SamplesFolder
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress


def open_data_folder(run: Run, package: Path = PACKAGE) -> DataFolder[Any, Any]:
    """The run's data folder: of text, or of its own model's arrays. `package`: the code that fills it."""
    if run.user_model is None:
        kind = open_source_folder if run.config.data.mixture is None else MixtureFolder
        return kind(run.config.data, run.data_dir, package)
    return SamplesFolder(run.config.data, run.data_dir, package, run.user_model)


def open_finished_data_folder(run: Run) -> DataFolder[Any, Any]:
    """The same for whoever only looks: it is filled by the run's own copy of the code."""
    return open_data_folder(run, run.code_dir / "data_prep")


def log(text: str) -> None:
    """Say something in the log."""
    print(text, flush=True)


def missing_outputs(run: Run) -> str | None:
    """Why prepare is not done; None when what it fixes validates."""
    return open_finished_data_folder(run).find_prepare_problem()


def quick_missing_outputs(run: Run) -> str | None:
    """The same of what it fixed alone: no input is asked whether it changed."""
    return open_finished_data_folder(run).find_prepare_problem(check_inputs=False)


def progress(run: Run) -> Progress:
    """How far it is."""
    folder = open_finished_data_folder(run)
    return Progress(folder.fixed if folder.find_prepare_problem(check_inputs=False) is None else "-")


def check_inputs(run: Run) -> None:
    """Raise UserError where `main` would at first sight."""
    open_data_folder(run).look()


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Do it; ranks beyond the first have nothing to do."""
    gc.enable()
    flag.exit_on_signal()
    if rank_info.rank == 0:
        open_data_folder(run).prepare(log)
    return ExitCode.DONE
