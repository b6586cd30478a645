"""Checkpoints as files: names, manifests, what is intact, what is old. No torch, so the login node may look.

    checkpoints/step-00000100/     .metadata, __0_0.distcp … (torch's distributed checkpoint) and manifest.json
    checkpoints/.tmp-…             being written, or left by a crash: never read, removed at the next start
    checkpoints/damaged-step-…     failed its hashes at a restore; set aside, never removed

`manifest.json` is written last, and the whole directory takes its final name by one rename after everything
was synced: a directory called `step-…` was once complete. It holds the step, `samples_consumed`, the layout,
a hash of the config, versions, and size and SHA-256 of each file; its own `sha256` field covers the rest of it.
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
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.points import list_points

MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
_STEP = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Directory name of a step, such as `step-00000100`."""
    return f"step-{step:08d}"


def list_checkpoint_steps(folder: Path) -> list[int]:
    """Steps whose directories bear their final name, newest first."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)


def find_newest_step(folder: Path) -> int:
    """The newest saved step whose files have their recorded sizes; 0 where there is none."""
    for step in list_checkpoint_steps(folder):
        try:
            manifest = read_checkpoint_manifest(folder / checkpoint_name(step))
            verify_checkpoint_files(folder / checkpoint_name(step), manifest, hashes=False)
        except CheckpointError:
            continue
        return step
    return 0


def read_early_stop(folder: Path, step: int) -> Mapping[str, Any] | None:
    """Return `reason` and planned `steps` of a training that a callback completed at `step`; None for any other."""
    with suppress(CheckpointError):
        extra = read_checkpoint_manifest(folder / checkpoint_name(step)).get("extra")
        early_stop = extra.get("early_stop") if isinstance(extra, dict) else None
        return early_stop if isinstance(early_stop, dict) else None
    return None


def describe_missing_checkpoints(run: Run) -> str | None:
    """Which checkpoint was saved where none is left, and the ways out; None where one is, or its metrics went, too."""
    if (
        list_checkpoint_steps(run.checkpoints_dir)
        or any(run.checkpoints_dir.glob("damaged-*"))
        or not run.metrics_file.exists()
    ):
        return None
    step = 0
    for event in run.read_events("train", "saved", "restored", "began_anew"):  # by their order: nodes' clocks differ
        step = 0 if event["event"] == "began_anew" else event["step"]
    if not step:
        return None
    return (
        f"step {step} was saved, and {run.checkpoints_dir} has no checkpoint: purged, moved, or not mounted? Bring one "
        f"back; or, to train from zero all the same, remove {run.metrics_file}"
    )


def read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of one checkpoint. Raises CheckpointError where it is missing, torn, altered or of another shape."""
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None
    if not has_valid_checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not fit its own hash")
    if not lines.is_checkpoint_manifest(manifest):
        raise CheckpointError(f"{path} does not say what a checkpoint's manifest says: no training wrote it")
    if (named := _STEP.fullmatch(checkpoint.name)) and int(named[1]) != manifest.get("step"):
        raise CheckpointError(f"{path} is of step {manifest.get('step')}: this folder had another name")
    return dict(manifest)


def verify_checkpoint_files(
    checkpoint: Path, manifest: Mapping[str, Any], *, hashes: bool = True, part: int = 0, parts: int = 1
) -> None:
    """Compare files with the manifest; of `parts` checkers each reads every `parts`-th file.

    Raises CheckpointError naming the first file that is missing, not listed, has another size or another SHA-256. An
    OSError (no rights, a storage that fails) is no damage and passes as it is.
    """
    if part == 0:
        _check_names(checkpoint, manifest)
    for name in sorted(manifest["files"])[part::parts]:
        path, want = checkpoint / name, manifest["files"][name]
        try:
            size = path.stat().st_size
            if size != want["size"]:
                raise CheckpointError(f"{path} is damaged: {size} bytes instead of {want['size']}")
            if hashes and sha256_file(path) != want["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one recorded when it was saved")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except UserError as error:  # a pipe or a device
            raise CheckpointError(str(error)) from None


def _check_names(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the manifest lists other files than there are, or not the one that is a pickle."""
    try:
        there = {path.name for path in checkpoint.iterdir()} - {MANIFEST_FILE}
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is missing") from None
    listed = manifest["files"]
    if METADATA_FILE not in listed:
        raise CheckpointError(f"{checkpoint / MANIFEST_FILE} does not list {METADATA_FILE}: no training wrote it")
    if missing := sorted(listed.keys() - there):  # also a name with a separator: it is none of a file here
        raise CheckpointError(f"{checkpoint}/{missing[0]} is missing")
    if unknown := sorted(there - listed.keys()):
        raise CheckpointError(
            f"{checkpoint / unknown[0]} is not listed in {MANIFEST_FILE}: no save wrote it; move it away"
        )


def set_checkpoint_aside(folder: Path, step: int) -> None:
    """Rename a damaged checkpoint so that nothing takes it again."""
    number = 0
    while (target := folder / f"damaged-{checkpoint_name(step)}{f'-{number}' if number else ''}").exists():
        number += 1
    (folder / checkpoint_name(step)).rename(target)


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove what a crash left half-written. Call it only when nobody is saving."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, each renamed first so that none is ever half there."""
    for step in list_checkpoint_steps(folder)[keep:]:
        trash = folder / f".tmp-old-{checkpoint_name(step)}"
        (folder / checkpoint_name(step)).rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def open_intact_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of the step `which` (None: the newest) with its manifest, each file compared with its hash.

    Raises CheckpointError naming what is damaged, and what `find_checkpoint` does.
    """
    checkpoint, manifest = find_checkpoint(run, which)
    verify_checkpoint_files(checkpoint, manifest)
    return checkpoint, manifest


def find_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """The same, its files not looked at.

    Raises CheckpointError where there is none, UserError for a sweep and for a step that is not there.
    """
    if found := list_points(run):
        raise UserError(
            f"{run.name} is a sweep, and each of its points has checkpoints: verify {found[0].name} and so on, up to "
            f"{found[-1].path.name}"
        )
    steps = list_checkpoint_steps(run.checkpoints_dir)
    if not steps:
        raise CheckpointError(f"{run.checkpoints_dir} holds no checkpoint")
    step = steps[0]
    if which not in (None, "newest"):
        if not which.isdecimal() or int(which) not in steps:
            raise UserError(f"--step {which}: no such checkpoint; there are: {', '.join(map(str, steps))}")
        step = int(which)
    checkpoint = run.checkpoints_dir / checkpoint_name(step)
    return checkpoint, read_checkpoint_manifest(checkpoint)
