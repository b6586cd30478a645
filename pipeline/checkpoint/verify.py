"""`verify RUN [--step N]`: hash every file of a checkpoint again and print its digest as the last line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError, UserError
from pipeline.checkpoint import catalog
from pipeline.checkpoint.save import digest
from pipeline.run.directory import Run
from pipeline.run.points import points


def intact_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of the step `which` (None: the newest) with its manifest, each file compared with its hash.

    Raises CheckpointError naming what is damaged, and what `named_checkpoint` does.
    """
    checkpoint, manifest = named_checkpoint(run, which)
    catalog.check_files(checkpoint, manifest)
    return checkpoint, manifest


def named_checkpoint(run: Run, which: str | None) -> tuple[Path, dict[str, Any]]:
    """The same, its files not looked at.

    Raises CheckpointError where there is none, UserError for a sweep and for a step that is not there.
    """
    if found := points(run):
        raise UserError(
            f"{run.name} is a sweep, and each of its points has checkpoints: verify {found[0].name} and so on, up to "
            f"{found[-1].path.name}"
        )
    steps = catalog.saved_steps(run.checkpoints)
    if not steps:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint")
    step = steps[0]
    if which not in (None, "newest"):
        if not which.isdecimal() or int(which) not in steps:
            raise UserError(f"--step {which}: no such checkpoint; there are: {', '.join(map(str, steps))}")
        step = int(which)
    checkpoint = run.checkpoints / catalog.step_name(step)
    return checkpoint, catalog.read_manifest(checkpoint)


def verify(run: Run, which: str | None) -> None:
    """Check one checkpoint and say so. Raises what `intact_checkpoint` does."""
    checkpoint, manifest = intact_checkpoint(run, which)
    total = sum(entry["size"] for entry in manifest["files"].values())
    layout = ", ".join(f"{key} {value}" for key, value in manifest["layout"].items())
    print(
        f"{run.name}/checkpoints/{checkpoint.name}: {len(manifest['files'])} files, {total:,} bytes, all hashes right"
    )
    print(f"step {manifest['step']}, samples {manifest['samples_consumed']}, saved by: {layout}")
    print(f"digest {digest(checkpoint)}")
