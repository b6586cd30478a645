"""`verify RUN`: check a checkpoint against its hashes."""

from __future__ import annotations

from cli.common import RunPath, Step, prepare_for_torch
from pipeline.run.directory import Run


def verify(run_path: RunPath, step: Step = None) -> None:
    """Hash the files of a checkpoint again, and print the digest of its weights and optimizer state."""
    run = Run.open(run_path)
    run.config.require_pipeline("verify")
    prepare_for_torch()
    from pipeline.checkpoint.checkpointer import verify_checkpoint

    verify_checkpoint(run, step)
