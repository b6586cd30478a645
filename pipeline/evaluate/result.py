"""The result of an evaluation: where it lies, whether it is of this checkpoint, and what to say of it.

The login node asks, so nothing here imports torch or numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.checkpoint.saved import read_manifest, saved_steps, step_name
from pipeline.run.directory import Run


def result_file(run: Run, step: int) -> Path:
    """Where the evaluation of a step is written."""
    return run.evaluation / f"{step_name(step)}.json"


def read_result(run: Run, step: int) -> dict[str, Any] | None:
    """The evaluation of a step, None where there is none, or none of this checkpoint."""
    try:
        result = json.loads(result_file(run, step).read_bytes())
        if result["checkpoint"] == read_manifest(run.checkpoints / step_name(step))["sha256"]:
            return dict(result)
    except (FileNotFoundError, ValueError, KeyError, TypeError, CheckpointError):
        pass
    return None


def newest_result(run: Run) -> dict[str, Any] | None:
    """The evaluation of the newest checkpoint that has one."""
    return next((result for step in saved_steps(run.checkpoints) if (result := read_result(run, step))), None)


def result_words(result: Mapping[str, Any]) -> str:
    """An evaluation in one line, text against the unigram figure."""
    words = f"step {result['step']}: held-out loss {result['loss']:.4f}"
    if "bits_per_byte" not in result:
        known = ("step", "loss", "samples", "entries", "checkpoint")
        return words + "".join(f", {name} {value:.4f}" for name, value in result.items() if name not in known)
    ratio = result["bits_per_byte"] / (result["unigram_bits_per_byte"] or float("nan"))
    return (
        f"{words}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.3f} bits per byte, "
        f"{ratio:.2f} × the unigram {result['unigram_bits_per_byte']:.3f}"
    )


def figure(result: Mapping[str, Any]) -> tuple[str, float]:
    """What evaluations are compared by, the less the better: bits per byte of text, else the loss."""
    name, key = ("bits per byte", "bits_per_byte") if "bits_per_byte" in result else ("held-out loss", "loss")
    return name, result[key]
