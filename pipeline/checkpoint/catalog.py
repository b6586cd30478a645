"""The files of checkpoints: names, manifests, verification and removal.

This module does not import torch, because login nodes use it.

    checkpoints/step-00000100/     .metadata, __0_0.distcp … (torch's distributed checkpoint) and manifest.json
    checkpoints/.tmp-…             being written, or left by a crash: never read, removed at the next start
    checkpoints/damaged-step-…     failed the verification during a restore: not used again, never removed

`manifest.json` is written last. After all files are synced, one rename gives the directory its final name. Therefore a
directory was complete when it got the name `step-…`. The manifest contains the step, `samples_consumed`, the layout, a
hash of the config, versions, and the size and SHA-256 of each file. Its field `sha256` is the hash of all other fields.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError, UserError
from pipeline.base.files import has_valid_checksum, read_json, sha256_file
from pipeline.run.directory import Run, list_points
from pipeline.run.events import read_stage_state
from pipeline.run.lines import has_fields, is_count, is_mapping, is_text
from pipeline.run.origin import read_origin

MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
"""The file of torch's distributed checkpoint (DCP) that lists the tensors of a checkpoint."""
_STEP = re.compile(r"step-(\d{8,})")
"""The directory name of a committed checkpoint, with its step."""


def checkpoint_name(step: int) -> str:
    """Return the name of the directory of a checkpoint, such as `step-00000100`."""
    return f"step-{step:08d}"


def list_checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of all committed checkpoints, newest first. The files are not checked."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)


def find_newest_step(folder: Path) -> int:
    """Return the newest step with a checkpoint whose files have the recorded sizes; 0 if there is none."""
    for step in list_checkpoint_steps(folder):
        try:
            manifest = read_checkpoint_manifest(folder / checkpoint_name(step))
            verify_checkpoint_files(folder / checkpoint_name(step), manifest, hashes=False)
        except CheckpointError:
            continue
        return step
    return 0


def read_early_stop(folder: Path, step: int) -> Mapping[str, Any] | None:
    """Return the entry `early_stop` in the manifest of the checkpoint of `step`.

    Return None if there is no such entry, or if the manifest cannot be read.

    The entry exists if a callback completed the train stage early. The entry contains the `reason` of the callback, and
    `steps`, the number of the step at which the stage should have ended according to the config. If the callback was
    that of `train.early_stopping`, the entry also contains `early_stopping`: the values of this section without the
    patience, and the number of evaluations without an improvement.
    """
    with suppress(CheckpointError):
        extra = read_checkpoint_manifest(folder / checkpoint_name(step)).get("extra")
        early_stop = extra.get("early_stop") if isinstance(extra, dict) else None
        return early_stop if isinstance(early_stop, dict) else None
    return None


def completes_stage(run: Run, step: int, early_stop: Mapping[str, Any] | None, steps: int) -> bool:
    """Return True if the train stage is complete, because a callback completed it early at `step`.

    The stage is no longer complete if the user then changes the number of steps, or raises the patience of
    `train.early_stopping`, or changes another key of this section or removes it. A fork that begins with the checkpoint
    is not complete either.

    Args:
        run: the run.
        step: the step of a checkpoint of this run.
        early_stop: the result of :func:`read_early_stop` for this checkpoint.
        steps: the number of the last step of the stage.
    """
    origin = read_origin(run)
    if early_stop is None or early_stop.get("steps") != steps or (origin is not None and origin.step == step):
        return False
    if (condition := early_stop.get("early_stopping")) is None:
        return True
    config = run.config.train.early_stopping
    if config is None:
        return False
    has_same_rule = config.rule.items() <= condition.items()
    return has_same_rule and bool(config.patience <= condition["evaluations_without_improvement"])


def describe_missing_checkpoints(run: Run) -> str | None:
    """Return a message if the run saved checkpoints that have disappeared; None otherwise.

    Return None also if metrics.jsonl does not exist: either the run is new, or the user removed the file to restart
    from scratch. A damaged checkpoint has not disappeared. A fork always has a checkpoint, and cannot restart from
    scratch.
    """
    if list_checkpoint_steps(run.checkpoints_dir):
        return None
    if origin := read_origin(run):
        return (
            f"{run.name} is a fork of {origin}, but {run.checkpoints_dir} has no intact checkpoint. Restore a "
            "checkpoint, or fork the run again under another name"
        )
    if any(run.checkpoints_dir.glob("damaged-*")) or not run.metrics_file.exists():
        return None
    step = read_stage_state(run.read_events("train")).saved_step
    if not step:
        return None
    return (
        f"step {step} was saved, but {run.checkpoints_dir} has no checkpoint. The checkpoints may have been purged "
        f"or moved, or their file system is not mounted. Restore a checkpoint; or, to train from scratch, "
        f"remove {run.metrics_file}"
    )


def is_checkpoint_manifest(manifest: Any) -> bool:
    """Return True if the JSON value `manifest` has the fields of a checkpoint's manifest."""
    required = {"step": is_count, "samples_consumed": is_count, "layout": is_mapping, "files": is_mapping}
    file_fields = {"size": is_count, "sha256": is_text}
    return has_fields(manifest, required, {}) and all(
        has_fields(entry, file_fields, {}) for entry in manifest["files"].values()
    )


def read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises CheckpointError if the manifest is missing, altered or malformed, or if its step is not the step in the name
    of the directory.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError("checkpoint.missing_file", f"{path} is missing") from None
    if not has_valid_checksum(manifest):
        raise CheckpointError("checkpoint.damaged_file", f"{path} is damaged: its content does not match its own hash")
    if not is_checkpoint_manifest(manifest):
        raise CheckpointError("checkpoint.malformed", f"{path} is not the manifest of a checkpoint")
    if (step_in_name := _STEP.fullmatch(checkpoint.name)) and int(step_in_name[1]) != manifest.get("step"):
        raise CheckpointError(
            "checkpoint.renamed",
            f"{path} belongs to step {manifest.get('step')}: rename its directory to "
            f"{checkpoint_name(manifest['step'])}",
        )
    return dict(manifest)


def verify_checkpoint_files(
    checkpoint: Path, manifest: Mapping[str, Any], *, hashes: bool = True, part: int = 0, parts: int = 1
) -> None:
    """Compare the files of a checkpoint with its manifest.

    Several ranks can share the work: each of `parts` ranks verifies every `parts`-th file, starting at number `part`.
    The rank with `part` 0 also compares the names of the files with the manifest.

    Args:
        checkpoint: the directory of the checkpoint.
        manifest: the manifest of the checkpoint.
        hashes: whether to compare SHA-256, in addition to sizes.
        part: the index of this rank among the ranks that share the work.
        parts: the number of ranks that share the work.

    Raises:
        CheckpointError: if a file is missing, is not listed in the manifest, or has another size or SHA-256.
        OSError: if a file cannot be read. Such a file is not necessarily damaged.
    """
    if part == 0:
        _check_names(checkpoint, manifest)
    for name in sorted(manifest["files"])[part::parts]:
        path = checkpoint / name
        expected = manifest["files"][name]
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(
                    "checkpoint.damaged_file", f"{path} is damaged: {size} bytes instead of {expected['size']}"
                )
            if hashes and sha256_file(path) != expected["sha256"]:
                raise CheckpointError(
                    "checkpoint.damaged_file", f"{path} is damaged: its SHA-256 is not the one recorded by the save"
                )
        except FileNotFoundError:
            raise CheckpointError("checkpoint.missing_file", f"{path} is missing") from None
        except UserError as error:  # The path is not a regular file, but a pipe, for example.
            raise CheckpointError("checkpoint.damaged_file", str(error)) from None


def _check_names(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the manifest lists exactly the existing files, including `.metadata`."""
    try:
        names = {path.name for path in checkpoint.iterdir()} - {MANIFEST_FILE}
    except FileNotFoundError:
        raise CheckpointError("checkpoint.missing_file", f"{checkpoint} is missing") from None
    listed_files = manifest["files"]
    if METADATA_FILE not in listed_files:
        raise CheckpointError("checkpoint.malformed", f"{checkpoint / MANIFEST_FILE} does not list {METADATA_FILE}")
    if missing_names := sorted(listed_files.keys() - names):  # A listed path in another directory counts as missing.
        raise CheckpointError("checkpoint.missing_file", f"{checkpoint}/{missing_names[0]} is missing")
    if unlisted_names := sorted(names - listed_files.keys()):
        raise CheckpointError(
            "checkpoint.unlisted_file",
            f"{checkpoint / unlisted_names[0]} is not listed in {MANIFEST_FILE}, so no save wrote it: move it away",
        )


def set_checkpoint_aside(folder: Path, step: int) -> None:
    """Rename a damaged checkpoint to `damaged-step-…`, so that it is not used again.

    If a directory with this name exists already, append a number: `damaged-step-…-1`.
    """
    target = folder / f"damaged-{checkpoint_name(step)}"
    number = 0
    while target.exists():
        number += 1
        target = folder / f"damaged-{checkpoint_name(step)}-{number}"
    (folder / checkpoint_name(step)).rename(target)


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove incomplete checkpoints that a crash left. Call this function only while no process is saving."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove a checkpoint.

    The checkpoint is renamed before its files are removed. So a directory with a final name is never incomplete, even
    if the process is killed in between.
    """
    trash = folder / f".tmp-old-{checkpoint_name(step)}"
    (folder / checkpoint_name(step)).rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def open_intact_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the directory and the manifest of a checkpoint, after verifying the hash of each file.

    Args:
        run: the run.
        which: the step, as the user typed it; None or `newest` for the newest checkpoint.

    Raises:
        CheckpointError: if a file is missing, damaged or not listed in the manifest, or there is no checkpoint.
        UserError: if the run is a sweep, or the step does not exist.
    """
    checkpoint, manifest = find_checkpoint(run, which)
    verify_checkpoint_files(checkpoint, manifest)
    return checkpoint, manifest


def find_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the directory and the manifest of a checkpoint, without verifying its files.

    Args:
        run: the run.
        which: the step, as the user typed it; None or `newest` for the newest checkpoint.

    Raises:
        CheckpointError: if there is no checkpoint, or the manifest is missing, damaged or malformed.
        UserError: if the run is a sweep, or the step does not exist.
    """
    if sweep_points := list_points(run):
        raise UserError(
            "run.is_a_sweep",
            f"{run.name} is a sweep, and its points have the checkpoints. Name one of them, for example "
            f"{sweep_points[0].path}; the last one is {sweep_points[-1].path.name}",
        )
    steps = list_checkpoint_steps(run.checkpoints_dir)
    if not steps:
        raise CheckpointError("checkpoint.none_saved", f"{run.checkpoints_dir} has no checkpoint")
    step = steps[0]
    if which not in (None, "newest"):
        if not which.isdecimal() or int(which) not in steps:
            saved = ", ".join(map(str, steps))
            raise UserError("checkpoint.no_such_step", f"--step {which}: no such checkpoint; saved steps: {saved}")
        step = int(which)
    checkpoint = run.checkpoints_dir / checkpoint_name(step)
    return checkpoint, read_checkpoint_manifest(checkpoint)
