"""Compare the predictions of `plan` with published training runs.

    python -m benchmarks.plan FILE.csv [--fit] [--write]

Each row of the file is a published run (benchmarks/published.py). The table has the errors of planning/predict.py for
each source, with its default constants and with constants that were fitted to all other sources. `--fit` prints
constants that are fitted to all rows. `--write` writes the table to benchmarks/results/plan.md. Rows that are not
supported are listed with the reason.

The fit is a maximum a posteriori estimate of the logarithms of the constants. Each constant has a prior: its physical
value in `PRIOR`, with a standard deviation of 20 %. The residual of a row is the logarithm of predicted divided by
published tokens/s, with an expected size of 10 %. A residual r above 5 % has the weight 1/|r|, which limits the
influence of outliers. n rows of one source together have the weight √n.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.footprint import estimate_footprint
from benchmarks.others import expert_and_context_time
from benchmarks.published import Row, read_rows
from benchmarks.table import write_table
from planning.predict import DEFAULT, Constants, StepPrediction, predict_step

PRIOR = Constants(
    matmul=0.85, portable=0.85, attention=0.8, memory=0.85, eager=2.0, link=0.75, launch=6e-6, hidden=0.6,
    overlap_slowdown=0.15, jitter=0.01,
)  # fmt: skip
PRIOR_WIDTH = 0.2
"""Standard deviation of the logarithm of each constant."""
NOISE = 0.1
"""Expected size of a residual."""


def predict_tokens_per_s(row: Row, constants: Constants = DEFAULT) -> float:
    """Return the predicted tokens per second of one GPU."""
    return predict_step(row.work, row.machine, constants, expert_and_context_time).tokens_per_gpu


def compute_residuals(rows: Sequence[Row], logs: np.ndarray) -> np.ndarray:
    """Return log(predicted / published) of each row.

    Args:
        logs: logarithms of the constants, shape (constants,).
    """
    constants = Constants(*np.exp(logs).tolist())
    return np.array([np.log(predict_tokens_per_s(row, constants) / row.tokens) for row in rows])


def fit_constants(rows: Sequence[Row], rounds: int = 5) -> tuple[Constants, np.ndarray, np.ndarray]:
    """Fit the constants to all rows, by solving linearized problems repeatedly.

    Returns:
        The constants, and the linear model of the residuals around them: slopes of shape (rows, constants), and
        offsets of shape (rows,) at logarithms of zero. :func:`fit_without_source` uses this model.
    """
    prior = np.log(np.array(list(asdict(PRIOR).values())))
    logs = prior.copy()
    for _ in range(rounds):
        residuals, slopes = _linearize(rows, logs)
        logs = _solve(rows, residuals - slopes @ logs, slopes, residuals, prior)
    residuals, slopes = _linearize(rows, logs)
    return Constants(*np.exp(logs).tolist()), slopes, residuals - slopes @ logs


def _linearize(rows: Sequence[Row], logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the residuals, shape (rows,), and their slopes by each constant's logarithm, shape (rows, constants)."""
    residuals = compute_residuals(rows, logs)
    step = 0.03
    shifted_residuals = [compute_residuals(rows, logs + step * unit_vector) for unit_vector in np.eye(len(logs))]
    return residuals, np.stack([(shifted - residuals) / step for shifted in shifted_residuals], axis=1)


def _solve(
    rows: Sequence[Row], offset: np.ndarray, slopes: np.ndarray, residuals: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Return the logarithms of the constants that minimize the weighted residuals and the distance to the prior.

    Args:
        rows: published runs.
        offset: residuals at logarithms of zero, shape (rows,).
        slopes: slopes of the residuals, shape (rows, constants). The residuals are offset + slopes @ logarithms.
        residuals: residuals from which the first weights are computed, shape (rows,).
        prior: logarithms of `PRIOR`, shape (constants,).
    """
    counts = Counter(row.source for row in rows)
    source_weight = np.array([1 / np.sqrt(counts[row.source]) for row in rows])
    for _ in range(10):
        weight = source_weight / (NOISE * np.maximum(0.05, np.abs(residuals)))
        left = slopes.T @ (slopes * weight[:, None]) + np.eye(len(prior)) / PRIOR_WIDTH**2
        logs = np.linalg.solve(left, prior / PRIOR_WIDTH**2 - slopes.T @ (weight * offset))
        residuals = offset + slopes @ logs
    # Constants that are shares cannot exceed 1. For other constants, 1e9 is no limit in practice.
    upper_bounds = np.log(
        [1.0 if name in ("matmul", "portable", "memory", "link", "hidden") else 1e9 for name in asdict(PRIOR)]
    )
    return np.minimum(logs, upper_bounds)


def fit_without_source(
    rows: Sequence[Row], source: str, slopes: np.ndarray, offset: np.ndarray, fitted: Constants
) -> Constants:
    """Return constants fitted to all sources except one.

    Args:
        rows: all rows.
        source: the source whose rows are not used.
        slopes: slopes of the residuals, from :func:`fit_constants`.
        offset: offsets of the residuals, from :func:`fit_constants`.
        fitted: the constants that are fitted to all rows, from which the fit starts.
    """
    kept = [number for number, row in enumerate(rows) if row.source != source]
    prior, logs = (np.log(np.array(list(asdict(constants).values()))) for constants in (PRIOR, fitted))
    residuals = offset[kept] + slopes[kept] @ logs
    solution = _solve([rows[number] for number in kept], offset[kept], slopes[kept], residuals, prior)
    return Constants(*np.exp(solution).tolist())


def quantile_percent(errors: Sequence[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of the absolute errors in per cent; NaN if there are no errors."""
    return 100 * float(np.quantile(np.abs(errors), share)) if len(errors) else float("nan")


def correlate_layout_order(rows: Sequence[Row], tokens: Sequence[float]) -> float:
    """Return how well predictions order the layouts of one model: the median over groups of Spearman's coefficient.

    A group has at least four rows with the same source, model, GPU, sequence length and precision. Without such a
    group, return NaN.

    Args:
        rows: published runs.
        tokens: predicted tokens per second of each row.
    """
    groups = defaultdict(list)
    for row, predicted in zip(rows, tokens, strict=True):
        key = (row.source, row.model, row.machine.gpu, row.work.sequence, row.work.precision)
        groups[key].append((row.tokens, predicted))
    coefficients = []
    for pairs in groups.values():
        if len(pairs) >= 4:
            ranks = np.array([_compute_ranks([pair[side] for pair in pairs]) for side in (0, 1)])
            coefficients.append(float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).min() > 0 else 0.0)
    return float(np.median(coefficients)) if coefficients else float("nan")


def _compute_ranks(values: Sequence[float]) -> list[float]:
    """Return a linear function of each value's average rank, which is sufficient for Spearman's coefficient.

    Values within 0.5 %, the variation of repeated runs, share their rank.
    """
    return [
        sum(other < value * 0.995 for other in values) + sum(other <= value * 1.005 for other in values)
        for value in values
    ]


def describe_parts(prediction: StepPrediction) -> str:
    """Return the parts of a step with their shares in per cent."""
    names = ("compute", "tensor", "others", "pipeline", "data", "bubble", "optimizer")
    shares = {name: getattr(prediction, name) / prediction.step for name in names}
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in shares.items() if share >= 0.01)


def compute_memory_errors(rows: Sequence[Row]) -> list[float]:
    """Return the relative errors of the predicted memory for the rows with published memory."""
    return [estimate_footprint(row.work).total / 2**30 / row.gib - 1 for row in rows if row.gib]


def format_errors(errors: Sequence[float], errors_without: Sequence[float]) -> list[str]:
    """Return the cells of the table that describe the errors of several rows.

    Args:
        errors: relative errors with the default constants.
        errors_without: relative errors with constants that were fitted without the source of the row.
    """
    figures = [
        quantile_percent(errors, 0.5),
        100 * float(np.median(errors)),
        quantile_percent(errors, 0.9),
        quantile_percent(errors_without, 0.5),
        quantile_percent(errors_without, 0.9),
    ]
    return [f"{figure:.1f} %" for figure in figures]


def main() -> None:
    """Print or write the table of errors by source, the largest errors and the rows that are not supported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows, unsupported = read_rows(arguments.file)
    if not rows:
        sys.exit(f"{arguments.file}: none of its rows is supported: {unsupported[:3]}")
    tokens = [predict_tokens_per_s(row) for row in rows]
    errors = [predicted / row.tokens - 1 for row, predicted in zip(rows, tokens, strict=True)]
    sources = list(dict.fromkeys(row.source for row in rows))
    fitted, slopes, offset = fit_constants(rows)
    table: list[list[str]] = []
    all_errors_without: list[float] = []
    for source in sources:
        source_rows = [row for row in rows if row.source == source]
        constants = fit_without_source(rows, source, slopes, offset, fitted) if len(sources) > 1 else PRIOR
        errors_without = [predict_tokens_per_s(row, constants) / row.tokens - 1 for row in source_rows]
        all_errors_without += errors_without
        source_errors = [error for row, error in zip(rows, errors, strict=True) if row.source == source]
        memory_errors = compute_memory_errors(source_rows)
        memory = f"{quantile_percent(memory_errors, 0.5):.1f} % of {len(memory_errors)}" if memory_errors else "-"
        table.append([source, str(len(source_rows)), *format_errors(source_errors, errors_without), memory])
    memory = f"{quantile_percent(compute_memory_errors(rows), 0.5):.1f} %"
    table.append(["all", str(len(rows)), *format_errors(errors, all_errors_without), memory])
    note = (
        "Errors of the predicted tokens/s of one GPU, compared with published runs. Fitted without it: predicted with "
        "constants that were fitted to all other sources. This second fit uses a linear approximation of the "
        "prediction, around the constants of the fit to all sources. "
        "`python -m benchmarks.plan FILE.csv --write`; the file of runs is not part of this repository. "
        "docs/planning.md explains the rows with the largest errors."
    )
    header = [
        "source", "rows", "median error", "median error with sign", "p90", "median error, fitted without it",
        "p90, fitted without it", "median error of memory",
    ]  # fmt: skip
    if arguments.write:
        write_table("plan", "Predicted and published throughput", note, header, table)
    else:
        print("\n".join(" | ".join(line) for line in (header, *table)))
    print("largest errors:")
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: -abs(pair[1]))[:12]:
        prediction = predict_step(row.work, row.machine, others=expert_and_context_time)
        print(f"  {row.id}: {100 * error:+.0f} %; parts of its step in %: {describe_parts(prediction)}")
    for name, reason in unsupported:
        print(f"not supported: {name}: {reason}")
    if unsupported:
        print(f"not supported: {len(unsupported)} of {len(rows) + len(unsupported)} rows")
    if arguments.fit:
        print(fitted)
    print(
        f"median error {quantile_percent(errors, 0.5):.1f} %, p90 {quantile_percent(errors, 0.9):.1f} %, "
        f"memory {quantile_percent(compute_memory_errors(rows), 0.5):.1f} %, "
        f"rank {correlate_layout_order(rows, tokens):.2f} over {len(rows)} rows"
    )


if __name__ == "__main__":
    main()
