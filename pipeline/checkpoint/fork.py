"""The files with which a fork begins: a verified checkpoint, its origin, and records of the steps until then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import fsync, link_or_copy, write_atomic
from pipeline.checkpoint.catalog import MANIFEST_FILE, read_checkpoint_manifest, verify_checkpoint_files
from pipeline.run.directory import Run
from pipeline.run.lines import read_valid_lines
from pipeline.run.metrics import is_step_line, select_recent_metrics
from pipeline.run.origin import SOURCE_FILE, Origin, read_origin

_VERIFY_THREADS = 8
"""Number of threads that hash the files of a checkpoint."""


def link_checkpoint(checkpoint: Path, target: Path) -> None:
    """Create the files of a checkpoint in the new directory `target`, and verify them.

    The files are hard links if possible, otherwise copies. Each run may remove its files, because the files of the
    other run stay. The new files are verified, and not the old ones, because a running train stage may remove the
    checkpoint at any time.

    Raises:
        CheckpointError: if a file is missing, damaged or not listed in the manifest.
        OSError: if a file cannot be read or written.
    """
    target.mkdir()
    try:
        manifest = read_checkpoint_manifest(checkpoint)
        for name in (*manifest["files"], MANIFEST_FILE):
            link_or_copy(checkpoint / name, target / name)
    except FileNotFoundError as error:
        raise CheckpointError(
            "checkpoint.missing_file",
            f"{error.filename} is missing. If the train stage has just removed this checkpoint (checkpoint.keep), "
            "choose a newer one",
        ) from None
    fsync(target)
    manifest = read_checkpoint_manifest(target)
    verify = partial(verify_checkpoint_files, target, manifest, parts=_VERIFY_THREADS)
    with ThreadPoolExecutor(_VERIFY_THREADS) as threads:
        for result in [threads.submit(verify, part=part) for part in range(_VERIFY_THREADS)]:
            result.result()


def read_recent_metrics(run: Run, step: int) -> list[dict[str, Any]]:
    """Return step, loss, learning rate and, if the step was skipped, the reason of the last steps up to `step`.

    The bad-step guard of a fork compares its losses with these. If the run is a fork itself, its own origin may have
    some of these steps.
    """
    origin = read_origin(run)
    lines = [*(origin.recent_metrics if origin else []), *read_valid_lines(run.metrics_file, is_step_line)]
    recent = select_recent_metrics(line for line in lines if line["step"] <= step)
    return [{key: line[key] for key in ("step", "loss", "lr", "skipped") if key in line} for line in recent]


def write_fork_files(
    run: Run, checkpoint: Path, new_run: Run, origin: Origin, decisions: Sequence[Mapping[str, Any]]
) -> None:
    """Write the checkpoint of a fork, and the files that describe its past.

    Args:
        run: the original run.
        checkpoint: the checkpoint in this run.
        new_run: the fork, whose directories exist.
        origin: the origin of the fork.
        decisions: the lines of decisions.jsonl that the fork keeps.

    Raises:
        CheckpointError: as :func:`link_checkpoint`, or if the checkpoint has been replaced in the meantime.
    """
    link_checkpoint(checkpoint, new_run.checkpoints_dir / checkpoint.name)
    if read_checkpoint_manifest(new_run.checkpoints_dir / checkpoint.name)["sha256"] != origin.manifest_sha256:
        raise CheckpointError("checkpoint.changed", f"{checkpoint} was replaced while it was read: try again")
    fsync(new_run.checkpoints_dir)
    origin.write(new_run.path)
    if (run.path / SOURCE_FILE).exists():
        shutil.copy(run.path / SOURCE_FILE, new_run.path)
        fsync(new_run.path / SOURCE_FILE)
    if decisions:
        write_atomic(new_run.decisions_file, "".join(json.dumps(line) + "\n" for line in decisions))
