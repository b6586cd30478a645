"""`verify RUN [--step N]`: hash every file of a checkpoint again and print its digest as the last line."""

from __future__ import annotations

from pipeline import checkpoint_files as files
from pipeline.checkpoint import digest
from pipeline.errors import CheckpointError, Exit, UserError
from pipeline.run import Run


def verify(run: Run, which: str | None) -> Exit:
    """Check one checkpoint (the newest without `which`). Raises CheckpointError naming what is damaged."""
    steps = files.saved_steps(run.checkpoints)
    if not steps:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint")
    step = steps[0]
    if which not in (None, "newest"):
        if not which.isdecimal() or int(which) not in steps:
            raise UserError(f"--step {which}: no such checkpoint; there are: {', '.join(map(str, steps))}")
        step = int(which)
    checkpoint = run.checkpoints / files.step_name(step)
    manifest = files.read_manifest(checkpoint)
    files.check_files(checkpoint, manifest)
    total = sum(entry["size"] for entry in manifest["files"].values())
    layout = ", ".join(f"{key} {value}" for key, value in manifest["layout"].items())
    print(
        f"{run.name}/checkpoints/{checkpoint.name}: {len(manifest['files'])} files, {total:,} bytes, all hashes right"
    )
    print(f"step {manifest['step']}, samples {manifest['samples_consumed']}, saved by: {layout}")
    print(f"digest {digest(checkpoint)}")
    return Exit.DONE
