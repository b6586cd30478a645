"""Read and validate the result files of evaluations, and select and describe their metrics.

This module imports neither torch nor numpy, because commands on the login node use it.
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
"""Metrics of an evaluation on text, in addition to the loss."""
TASK_METRIC_SUFFIXES = (".accuracy", ".accuracy_norm", ".loss")
"""Suffixes of the metrics of evaluation tasks and of the sources of a mixture. A result also contains the standard
errors and the numbers of items of tasks."""
STDERR_SUFFIX = "_stderr"
"""Suffix of standard errors."""
ITEMS_SUFFIX = "items"
"""The number of items of a task is in the key `TASK.items`."""
HELD_OUT_PREFIX = "held_out_"
"""Prefix of metrics that the train stage measures on held-out data (`train.evaluate_every`)."""
EMA_PREFIX = "ema_"
"""Prefix of metrics of the moving average of the weights (`train.ema`)."""


def result_file(run: Run, step: int) -> Path:
    """Return the path of the file for the result of a step."""
    return run.evaluation_dir / f"{checkpoint_name(step)}.json"


def _read_result_file(path: Path) -> dict[str, Any] | None:
    """Return the result in a file; None if the file is malformed or its checksum is wrong.

    Raises FileNotFoundError if the file does not exist.
    """
    result = read_json(path)
    if not isinstance(result, dict) or has_wrong_checksum(result):
        return None
    text_metrics = TEXT_METRICS if "bits_per_byte" in result else ()
    other_metrics = [key for key in result if key not in ("checkpoint", "sha256")]
    is_valid = all(is_number(result.get(key)) for key in ("step", "loss", *text_metrics, *other_metrics))
    return result if is_valid and isinstance(result.get("checkpoint"), str) else None


def read_result(run: Run, step: int) -> dict[str, Any] | None:
    """Return the result of a step; None if there is no valid result for the existing checkpoint of this step."""
    with suppress(FileNotFoundError, CheckpointError):
        result = _read_result_file(result_file(run, step))
        if result is None:
            return None
        manifest = read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))
        if result["checkpoint"] == manifest["sha256"]:
            return result
    return None


def read_all_results(run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all valid results, also results of deleted checkpoints, and the names of invalid files."""
    results = {path.name: _read_result_file(path) for path in sorted(run.evaluation_dir.glob("step-*.json"))}
    return [result for result in results.values() if result], [name for name, result in results.items() if not result]


def read_newest_result(run: Run) -> dict[str, Any] | None:
    """Return the result of the newest checkpoint that has a result; None if no checkpoint has a result."""
    return next(
        (result for step in list_checkpoint_steps(run.checkpoints_dir) if (result := read_result(run, step))), None
    )


def format_result(result: Mapping[str, Any]) -> str:
    """Return one line that describes a result. For text, it compares the bits per byte with the unigram entropy."""
    text = f"step {result['step']}: held-out loss {result['loss']:.4f}"
    extra_text = "".join(f", {name} {value:.4f}" for name, value in get_extra_metrics(result).items())
    if "bits_per_byte" not in result:
        return text + extra_text
    # NaN avoids a division by zero, if the text has only one kind of token.
    ratio = result["bits_per_byte"] / (result["unigram_bits_per_byte"] or float("nan"))
    return (
        f"{text}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.3f} bits per byte, "
        f"{ratio:.2f} × the unigram {result['unigram_bits_per_byte']:.3f}{extra_text}"
    )


def add_ema_metrics(result: Mapping[str, Any], ema_result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `result` with the metrics of `ema_result`, whose names get the prefix `ema_`.

    Args:
        result: the result of the weights.
        ema_result: the result of their moving average (`train.ema`), on the same data.
    """
    # The unigram entropy and the numbers of items depend only on the data.
    metrics = {
        f"{EMA_PREFIX}{name}": value
        for name, value in get_metrics(ema_result).items()
        if not name.startswith("unigram_") and not name.endswith(f".{ITEMS_SUFFIX}")
    }
    return {**result, **metrics}


def remove_ema_metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without the metrics that `add_ema_metrics` has added."""
    return {name: value for name, value in result.items() if not name.startswith(EMA_PREFIX)}


def get_extra_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of tasks and sources by name; for a custom model, all metrics except the loss.

    With `train.ema`, also return the loss and these metrics of the moving average of the weights.
    """
    metrics = get_metrics(result)
    if "bits_per_byte" in result:
        return {
            name: value
            for name, value in metrics.items()
            if name == f"{EMA_PREFIX}loss" or ("." in name and name.endswith(TASK_METRIC_SUFFIXES))
        }
    return {name: value for name, value in metrics.items() if name != "loss"}


def get_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return all metrics of a result by name, including standard errors and numbers of items."""
    counts = ("tokens", "bytes") if "bits_per_byte" in result else ("samples", "entries")
    other_fields = ("step", "checkpoint", "sha256", *counts)
    return {name: value for name, value in result.items() if name not in other_fields}


def get_metrics_without_errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a result by name, without standard errors and numbers of items."""
    metrics = get_metrics(result)
    is_text = "bits_per_byte" in result
    return {
        name: value
        for name, value in metrics.items()
        if not (name.endswith(STDERR_SUFFIX) and name.removesuffix(STDERR_SUFFIX) in metrics)
        and not (is_text and "." in name and not name.endswith(TASK_METRIC_SUFFIXES))
    }


def format_held_out(line: Mapping[str, Any]) -> str:
    """Return text with the held-out metrics in a line of metrics.jsonl; "" if the line has none."""
    metrics = {name: value for name, value in line.items() if name.startswith(HELD_OUT_PREFIX) and value is not None}
    return ", ".join(f"held-out {name.removeprefix(HELD_OUT_PREFIX)} {value:.4f}" for name, value in metrics.items())


def get_main_metric(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and value of the metric by which results are compared. Lower is better.

    The metric is bits per byte for text, otherwise the loss.
    """
    if "bits_per_byte" in result:
        return "bits per byte", result["bits_per_byte"]
    return "held-out loss", result["loss"]
