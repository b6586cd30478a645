"""`fork RUN --name NEW`: create a run that continues from a checkpoint of another run, with a changed config.

The other run is only read, so it may be running. Its checkpoint and, if possible, its shards become hard links in the
new run. pipeline/run/fork.py describes which keys may change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common import DryRun, Overrides, PreviewMachine, RunPath, Scripts, Step, console
from cli.submit import ForkPreview, check_jobs, note_oversubscription, print_plan, start_run
from data_prep.data_folder import PROGRESS_FILE
from data_prep.mixture_folder import MixtureFolder
from data_prep.prepare import open_data_folder
from pipeline.base.errors import CheckpointError, UserError, limit_lines
from pipeline.base.files import fsync, link_or_copy, sha256_json
from pipeline.checkpoint.catalog import find_checkpoint, verify_checkpoint_files
from pipeline.checkpoint.fork import read_recent_metrics, write_fork_files
from pipeline.config.read import make_run_values_dumper, remove_metadata
from pipeline.config.sections import Config
from pipeline.data.manifest import Manifest, count_training_steps, hash_sources, list_data_hashes, load_data_manifest
from pipeline.run import stages
from pipeline.run.code import CODE_ROOT
from pipeline.run.decisions import is_decision, select_decisions_until
from pipeline.run.directory import Run
from pipeline.run.events import Created
from pipeline.run.fork import (
    TOKENIZER_FILE,
    describe_fork_changes,
    get_tokenizer_copy,
    list_continued_sources,
    make_fork_config,
)
from pipeline.run.lines import read_required_lines
from pipeline.run.origin import OrderStart, Origin, read_origin
from pipeline.train.lr_schedule import compute_learning_rate
from slurm.submit.executor import Executor, choose_executor
from tracking.tracker import check_tracker_packages

_ORIGIN_MODULE = "pipeline/run/origin.py"
"""A module that the code of a fork needs. The code of older runs does not have it."""
WHOLE_FOLDER = "."
"""The whole data folder, as an element of the result of :func:`find_reusable_folders`."""


@dataclass(frozen=True)
class Fork:
    """A fork before it is created."""

    run: Run
    """The original run."""
    checkpoint: Path
    """The checkpoint of this run."""
    config: Config
    """The config of the fork."""
    origin: Origin
    decisions: Sequence[Mapping[str, Any]]
    """The lines of decisions.jsonl about the steps until the checkpoint."""
    data_folders: list[str]
    """The folders of shards that the fork can use (`find_reusable_folders`)."""
    update_code: bool
    """Whether the fork gets the current code, and not that of the original run."""

    @property
    def code_root(self) -> Path:
        """The directory with the code that the fork gets."""
        return CODE_ROOT if self.update_code else self.run.code_dir

    @property
    def copies_tokenizer(self) -> bool:
        """Whether the fork gets a copy of the tokenizer, with which its data is prepared."""
        return self.config.data.tokenizer.path == get_tokenizer_copy(self.config)

    @property
    def done_stages(self) -> list[str]:
        """The stages whose outputs the fork gets."""
        return ["prepare", "shard"] if WHOLE_FOLDER in self.data_folders else []


def fork(
    run_path: RunPath,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(metavar="NEW", help="name of the new run; its directory is next to RUN")] = "",
    step: Step = None,
    update_code: Annotated[bool, typer.Option(help="use the current code instead of the code of RUN")] = False,
    dry_run: DryRun = False,
    scripts: Scripts = False,
    machine: PreviewMachine = None,
    executor: Annotated[Executor, typer.Option(help="where to run; auto: where RUN was before")] = "auto",
) -> None:
    """Create a run that continues from a checkpoint of RUN: weights, optimizer state and position in the data.

    KEY=VALUE changes the config from there on, such as train.steps=1200 optimizer.lr=1e-4. RUN is not changed.
    """
    if (scripts or machine is not None) and not dry_run:
        raise UserError("cli.conflict", "--scripts and --machine require --dry-run")
    if not name:
        raise UserError("fork.name", "--name is missing: give the new run a name")
    run = Run.open(run_path)
    run.check_owner()
    run.config.require_pipeline("fork")
    chosen_executor = executor
    if executor != "slurm" or not dry_run:  # a dry run for Slurm also works without a controller
        chosen_executor = choose_executor(executor, run)
    planned = plan_fork(run, name, step, overrides or [], update_code)
    code_notes = check_fork(planned, chosen_executor == "slurm")
    if dry_run:
        notes = [*_describe_fork(planned), *code_notes]
        if chosen_executor == "local":
            notes += note_oversubscription(planned.config)
        changes = [f"changes   {key}: {change}" for key, change in planned.origin.changes.items()]
        preview = ForkPreview(
            run, planned.code_root, planned.done_stages, [f"origin    {planned.origin}", *limit_lines(changes, 20)]
        )
        print_plan(planned.config, chosen_executor, console, notes, scripts=scripts, machine=machine, fork=preview)
        return
    new_run = create_fork(planned)
    console.print(f"forked from {planned.origin}", soft_wrap=True)
    for key, change in planned.origin.changes.items():
        console.print(f"changed {key}: {change}", soft_wrap=True)
    for line in _describe_fork(planned):
        console.print(line, soft_wrap=True)
    new_run.code_notes = code_notes
    start_run(new_run, chosen_executor, is_resumed=False)


def plan_fork(run: Run, name: str, which: str | None, overrides: Sequence[str], update_code: bool) -> Fork:
    """Return a fork that can be created. Nothing is written.

    Args:
        run: the original run.
        name: the name of the fork.
        which: the step, as the user typed it; None for the newest intact checkpoint.
        overrides: changes of the config, as `KEY=VALUE`.
        update_code: whether to use the current code instead of the code of the original run.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or does not belong to the data of the run.
        UserError: if the fork exists, or its config cannot be used.
    """
    checkpoint, manifest = find_checkpoint(run, which)
    verify_checkpoint_files(checkpoint, manifest, hashes=False)
    config = make_fork_config(run, manifest["step"], name, overrides)
    Run(config.run.root / config.run.name).check_does_not_exist()
    if not update_code and not (run.code_dir / _ORIGIN_MODULE).is_file():
        raise UserError("fork.old_code", f"the code of {run.name} is older than `fork`: add --update-code")
    package = (CODE_ROOT if update_code else run.code_dir.resolve()) / "data_prep"
    decisions = read_required_lines(run.decisions_file, is_decision)
    earlier_decisions, position = select_decisions_until(decisions, manifest["samples_consumed"])
    own_origin = read_origin(run)
    data = load_data_manifest(run.config, run.data_dir)
    is_own_origin = own_origin is not None and manifest["sha256"] == own_origin.manifest_sha256
    if not is_own_origin and manifest.get("data_hash") != sha256_json(list_data_hashes(data)):
        raise CheckpointError(
            "checkpoint.other_training", f"{checkpoint} was trained on other shards than those in {run.data_dir}"
        )
    continued = list_continued_sources(run.config, config)
    hashes = hash_sources(data)
    order_start = OrderStart(manifest["step"], position)
    if continued:
        order_start = OrderStart() if own_origin is None else own_origin.order_start
    origin = Origin(
        run=str(run.path),
        step=manifest["step"],
        manifest_sha256=manifest["sha256"],
        changes=describe_fork_changes(run, config),
        order_start=order_start,
        source_hashes={name: hashes[name] for name in continued},
        tokenizer_sha256=data.tokenizer_sha256 if isinstance(data, Manifest) else None,
        recent_metrics=read_recent_metrics(run, manifest["step"]),
    )
    data_folders = find_reusable_folders(run, config, package)
    steps = count_training_steps(config, run.data_dir)
    if continued and steps is not None and steps <= manifest["step"]:  # `make_fork_config` has checked `train.steps`
        raise UserError(
            "fork.unchangeable_key",
            f"train.epochs: {config.train.epochs} epochs have {steps} steps, and the checkpoint is of step "
            f"{manifest['step']}: set a larger number",
        )
    return Fork(run, checkpoint, config, origin, earlier_decisions, data_folders, update_code)


def check_fork(fork: Fork, on_slurm: bool) -> list[str]:
    """Check whether a fork can be created and started. Return notes about the code of a custom model.

    Raises UserError as `check_submission` does.
    """
    config = fork.config
    new_run = Run(config.run.root / config.run.name, config)
    new_run.check_can_create()
    check_tracker_packages(config)
    # with the original's directory, so that its copy of a custom model is found
    preview = new_run if fork.update_code else fork.run.with_config(config)
    if fork.copies_tokenizer:  # the copy does not exist yet
        tokenizer = config.data.tokenizer.model_copy(update={"path": fork.run.data_dir / TOKENIZER_FILE})
        data = config.data.model_copy(update={"tokenizer": tokenizer})
        preview = preview.with_config(config.model_copy(update={"data": data}))
    if config.site.container is None:
        stages.check_stage_inputs(preview, fork.done_stages)
    if on_slurm:
        check_jobs(preview)
    return new_run.check_model_code() if fork.update_code else []


def create_fork(fork: Fork) -> Run:
    """Create the directory of a fork, and return its run. The directory appears when it is complete.

    Raises:
        CheckpointError: if the checkpoint is damaged, or was removed in the meantime.
        UserError: if the directory exists.
        OSError: if a file cannot be written (see `find_storage_error`).
    """
    run = fork.run

    def fill(new_run: Run) -> None:
        """Write all files of the fork except its config and its events."""
        write_fork_files(run, fork.checkpoint, new_run, fork.origin, fork.decisions)
        if fork.copies_tokenizer:
            link_or_copy(run.data_dir / TOKENIZER_FILE, new_run.path / TOKENIZER_FILE)
        link_folders(run.data_dir, fork.data_folders, new_run.data_dir)
        if fork.update_code:
            new_run.copy_code()
        else:
            shutil.copytree(run.code_dir.resolve(), new_run.code_dir, symlinks=True)
        if run.work_dir.exists():
            shutil.copytree(run.work_dir, new_run.work_dir, symlinks=True)
        fsync(new_run.path)

    first_events = run.read_events(None, Created)
    created = Created(
        config=str(fork.config.run.root / fork.config.run.name / "config.yaml"),
        working_dir=first_events[0].working_dir if first_events else None,
        origin=str(run.path),
        step=fork.origin.step,
    )
    # The code of the original may be older than this code, and may not know newer keys.
    values = fork.config.model_dump(mode="json")
    if not fork.update_code:
        values = remove_metadata(make_run_values_dumper(run.config_file)(fork.config))
    return Run.create_from(fork.config, values, created, fill)


def _describe_fork(fork: Fork) -> Iterator[str]:
    """Yield lines about the data of a fork, and about its learning rate at the first and the last step."""
    if WHOLE_FOLDER in fork.data_folders:
        yield "shards    those of the original"
    elif fork.data_folders:
        yield f"shards    those of the original for {', '.join(fork.data_folders)}; the others are prepared"
    else:
        yield "shards    prepared for the fork"
    step = fork.origin.step
    if fork.origin.source_hashes:
        yield "order     continues after the samples of the original"
    else:
        yield f"order     the first epoch of the data begins at step {step + 1}"
    config = fork.config
    steps = count_training_steps(config, fork.run.data_dir) if WHOLE_FOLDER in fork.data_folders else config.train.steps
    if steps is None or config.optimizer.schedule == "own":  # the user's module defines the schedule
        return
    first, last = (compute_learning_rate(config.optimizer, number, steps) for number in (step + 1, steps))
    before = "".join(
        f"{line['lr']:.3g} at step {step} of the original, "
        for line in fork.origin.recent_metrics[-1:]
        if line["step"] == step and line.get("lr") is not None
    )
    yield f"lr        {before}{first:.3g} at step {step + 1}, {last:.3g} at step {steps}"


# -- data ------------------------------------------------------------------------------------------------------
#
# These functions are not in data_prep, because all shards depend on a hash of the code in data_prep.


def find_reusable_folders(run: Run, config: Config, package: Path) -> list[str]:
    """Return the folders in the data folder of `run` that a fork with `config` can use as they are.

    Args:
        run: the run whose shards may be used.
        config: the config of the fork.
        package: the folder of the fork's code of `data_prep`.

    Returns:
        [WHOLE_FOLDER], the names of some sources of a mixture, or [].
    """
    folder = open_data_folder(run.with_config(config), package)
    if folder.find_shard_problem() is None:
        return [WHOLE_FOLDER]
    if not isinstance(folder, MixtureFolder):
        return []
    return [name for name, source in folder.sources.items() if source.find_shard_problem() is None]


def link_folders(data_dir: Path, names: list[str], target: Path) -> None:
    """Create the files of folders in another data folder, as hard links if possible.

    The stages prepare and shard replace files and never change them in place, so the folders stay independent.

    Args:
        data_dir: the data folder with the files.
        names: the result of `find_reusable_folders`.
        target: the other data folder.
    """
    data_dir = data_dir.resolve()  # In a sweep point, the data folder is a link.
    for name in names:
        for folder, _, file_names in os.walk(data_dir / name):
            new_folder = target / os.path.relpath(folder, data_dir)
            new_folder.mkdir(parents=True, exist_ok=True)
            for file_name in file_names:
                # Names that begin with a dot are temporary files of processes that still run or were killed.
                if not file_name.startswith(".") and file_name != PROGRESS_FILE:
                    link_or_copy(Path(folder, file_name), new_folder / file_name)
            fsync(new_folder)
