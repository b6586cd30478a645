"""`export RUN DIR`: write the weights of a checkpoint in Hugging Face format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.common import RunPath, Step, prepare_for_torch
from pipeline.run.directory import Run


def export(
    run_path: RunPath,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that does not exist yet")],
    step: Step = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="data type of the weights")] = "fp32",
    merge: Annotated[bool, typer.Option("--merge", help="add the adapter to the weights of the model")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="export the moving average of the weights (train.ema)")] = False,
    average: Annotated[
        int | None, typer.Option(min=2, help="export the mean of the weights of this number of checkpoints")
    ] = None,
) -> None:
    """Export a checkpoint as a folder for transformers: weights (safetensors), config.json and the tokenizer."""
    run = Run.open(run_path)
    run.config.require_pipeline("export")
    prepare_for_torch()
    # with this variable, torch allocates huge pages, and the export takes a third less time
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from pipeline.publish.export import export_checkpoint

    print(export_checkpoint(run, folder.absolute(), step, dtype, merge=merge, ema=ema, average=average))
