"""The result of an evaluation: where it lies, whether it is of this checkpoint, and what to say of it.

The login node asks, so nothing here imports torch or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import has_wrong_checksum, read_json
from pipeline.checkpoint.catalog import checkpoint_name, list_checkpoint_steps, read_checkpoint_manifest
from pipeline.run.directory import Run
from pipeline.run.lines import is_number

TEXT_METRICS = ("perplexity", "bits_per_byte", "unigram_bits_per_byte")
"""What an evaluation on text has besides its loss."""
TASK_METRIC_SUFFIXES = (".accuracy", ".accuracy_norm", ".loss")
"""How the names of what tasks, and sources of a mixture, came to end; standard errors and counts stand beside them."""
STDERR_SUFFIX = "_stderr"
"""How the names of standard errors end."""
ITEMS_SUFFIX = "items"
"""How the names of the numbers of a task's items end, after a dot."""
HELD_OUT_PREFIX = "held_out_"
"""What precedes the name of each figure that a training takes of held-out data (`train.evaluate_every`)."""


def result_file(run: Run, step: int) -> Path:
    """Where the evaluation of a step is written."""
    return run.evaluation_dir / f"{checkpoint_name(step)}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """The evaluation in a file; None where it is torn or altered."""
    result = read_json(path)
    if not isinstance(result, dict) or has_wrong_checksum(result):
        return None
    of_text = TEXT_METRICS if "bits_per_byte" in result else ()
    named = [key for key in result if key not in ("checkpoint", "sha256")]
    whole = all(is_number(result.get(key)) for key in ("step", "loss", *of_text, *named))
    return result if whole and isinstance(result.get("checkpoint"), str) else None


def read_result(run: Run, step: int) -> dict[str, Any] | None:
    """The evaluation of a step, None where there is none, or none of this checkpoint."""
    with suppress(FileNotFoundError, CheckpointError):
        result = _read(result_file(run, step))
        if (
            result
            and result["checkpoint"] == read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))["sha256"]
        ):
            return result
    return None


def read_all_results(run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """All evaluations, also of checkpoints that are gone; and the names of files that hold none."""
    found = {path.name: _read(path) for path in sorted(run.evaluation_dir.glob("step-*.json"))}
    return [result for result in found.values() if result], [name for name, result in found.items() if not result]


def read_newest_result(run: Run) -> dict[str, Any] | None:
    """The evaluation of the newest checkpoint that has one."""
    return next(
        (result for step in list_checkpoint_steps(run.checkpoints_dir) if (result := read_result(run, step))), None
    )


def format_result(result: Mapping[str, Any]) -> str:
    """An evaluation in one line, text against the unigram figure."""
    words = f"step {result['step']}: held-out loss {result['loss']:.4f}"
    more = "".join(f", {name} {value:.4f}" for name, value in get_extra_metrics(result).items())
    if "bits_per_byte" not in result:
        return words + more
    ratio = result["bits_per_byte"] / (result["unigram_bits_per_byte"] or float("nan"))
    return (
        f"{words}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.3f} bits per byte, "
        f"{ratio:.2f} × the unigram {result['unigram_bits_per_byte']:.3f}{more}"
    )


def get_extra_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """What a model of one's own measured besides its loss; of text what its tasks came to."""
    figures = get_metrics(result)
    if "bits_per_byte" in result:
        return {name: value for name, value in figures.items() if "." in name and name.endswith(TASK_METRIC_SUFFIXES)}
    return {name: value for name, value in figures.items() if name != "loss"}


def get_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """What an evaluation found, by name."""
    counts = ("tokens", "bytes") if "bits_per_byte" in result else ("samples", "entries")
    known = ("step", "checkpoint", "sha256", *counts)
    return {name: value for name, value in result.items() if name not in known}


def get_metrics_without_errors(result: Mapping[str, Any]) -> dict[str, float]:
    """What an evaluation measured, by name: its figures without standard errors and without numbers of items."""
    figures, of_text = get_metrics(result), "bits_per_byte" in result
    return {
        name: value
        for name, value in figures.items()
        if not (name.endswith(STDERR_SUFFIX) and name.removesuffix(STDERR_SUFFIX) in figures)
        and not (of_text and "." in name and not name.endswith(TASK_METRIC_SUFFIXES))
    }


def format_held_out(line: Mapping[str, Any]) -> str:
    """What a step's line says of held-out data, in words; "" where it says nothing."""
    found = {name: value for name, value in line.items() if name.startswith(HELD_OUT_PREFIX) and value is not None}
    return ", ".join(f"held-out {name.removeprefix(HELD_OUT_PREFIX)} {value:.4f}" for name, value in found.items())


def get_main_metric(result: Mapping[str, Any]) -> tuple[str, float]:
    """What evaluations are compared by, the less the better: bits per byte of text, else the loss."""
    name, key = ("bits per byte", "bits_per_byte") if "bits_per_byte" in result else ("held-out loss", "loss")
    return name, result[key]
