"""How well the prediction of `plan` meets published runs.

    python -m benchmarks.plan FILE.csv [--fit] [--write]

Each row is predicted with the constants of planning/predict.py. The table by source says beside it how well
the source is predicted by constants that were fitted to all other sources. `--fit` prints constants fitted to all rows;
`--write` writes the table to benchmarks/results/plan.md. Rows that cannot be taken are listed with the reason.

The fit is a maximum a posteriori: each constant has a prior (its physical value in `PRIOR`, 20 % wide), a source
counts by the root of its rows, and the residual of a row is the logarithm of predicted over printed tokens/s, expected
to be 10 %, and weighed by 1/|residual| beyond 5 % so that a few odd rows do not rule.
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
from benchmarks.others import communication_time
from benchmarks.published import Row, rows_of
from benchmarks.table import write_table
from planning.predict import DEFAULT, Constants, StepPrediction, predict_step

PRIOR = Constants(
    matmul=0.85, portable=0.85, attention=0.8, memory=0.85, eager=2.0, link=0.75, launch=6e-6, hidden=0.6,
    beside=0.15, jitter=0.01,
)  # fmt: skip
WIDTH, NOISE = 0.2, 0.1


def predicted(row: Row, constants: Constants = DEFAULT) -> float:
    """Tokens per second of one GPU."""
    return predict_step(row.work, row.machine, constants, communication_time).tokens_per_gpu


def residuals(rows: Sequence[Row], logs: np.ndarray) -> np.ndarray:
    """log(predicted / printed) of rows, with constants whose logarithms are `logs`."""
    constants = Constants(*np.exp(logs).tolist())
    return np.array([np.log(predicted(row, constants) / row.tokens) for row in rows])


def fit(rows: Sequence[Row], rounds: int = 5) -> tuple[Constants, np.ndarray, np.ndarray]:
    """Constants for all rows; with the Jacobian and the residuals there, from which a source can be taken out."""
    prior = np.log(np.array(list(asdict(PRIOR).values())))
    logs = prior.copy()
    for _ in range(rounds):
        found, slopes = _linear(rows, logs)
        logs = _solve(rows, found - slopes @ logs, slopes, found, prior)
    found, slopes = _linear(rows, logs)
    return Constants(*np.exp(logs).tolist()), slopes, found - slopes @ logs


def _linear(rows: Sequence[Row], logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = residuals(rows, logs)
    step = 0.03
    ways = [residuals(rows, logs + step * unit) for unit in np.eye(len(logs))]
    return found, np.stack([(way - found) / step for way in ways], axis=1)


def _solve(
    rows: Sequence[Row], offset: np.ndarray, slopes: np.ndarray, found: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Logarithms that make offset + slopes @ logs small, by rows' weights, and stay near the prior."""
    counts = Counter(row.source for row in rows)
    share = np.array([1 / np.sqrt(counts[row.source]) for row in rows])
    for _ in range(10):
        weight = share / (NOISE * np.maximum(0.05, np.abs(found)))
        left = slopes.T @ (slopes * weight[:, None]) + np.eye(len(prior)) / WIDTH**2
        logs = np.linalg.solve(left, prior / WIDTH**2 - slopes.T @ (weight * offset))
        found = offset + slopes @ logs
    # a share of something stays one
    most = np.log(
        [1.0 if name in ("matmul", "portable", "memory", "link", "hidden") else 1e9 for name in asdict(PRIOR)]
    )
    return np.minimum(logs, most)


def without(rows: Sequence[Row], source: str, slopes: np.ndarray, offset: np.ndarray, at: Constants) -> Constants:
    """Constants fitted to all sources but one, by the linearised rows around the fit to all."""
    keep = [number for number, row in enumerate(rows) if row.source != source]
    prior, logs = (np.log(np.array(list(asdict(made).values()))) for made in (PRIOR, at))
    found = offset[keep] + slopes[keep] @ logs
    made = _solve([rows[number] for number in keep], offset[keep], slopes[keep], found, prior)
    return Constants(*np.exp(made).tolist())


def quantile(values: Sequence[float], share: float) -> float:
    """In per cent."""
    return 100 * float(np.quantile(np.abs(values), share)) if len(values) else float("nan")


def rank_of_layouts(rows: Sequence[Row], tokens: Sequence[float]) -> float:
    """Spearman's coefficient of printed and predicted tokens/s among layouts of one model, median over groups of
    at least four rows of one source, model, GPU, sequence and precision."""
    groups = defaultdict(list)
    for row, found in zip(rows, tokens, strict=True):
        groups[row.source, row.model, row.machine.gpu, row.work.sequence, row.work.precision].append(
            (row.tokens, found)
        )
    ranks_of = []
    for pairs in groups.values():
        if len(pairs) >= 4:
            ranks = np.array([_ranks([pair[side] for pair in pairs]) for side in (0, 1)])
            ranks_of.append(float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).min() > 0 else 0.0)
    return float(np.median(ranks_of)) if ranks_of else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks, those of equal values shared; values within 0.5 % are equal, which is how runs repeat."""
    return [
        sum(other < value * 0.995 for other in values) + sum(other <= value * 1.005 for other in values)
        for value in values
    ]


def parts(found: StepPrediction) -> str:
    """Where a step goes, in per cent."""
    names = ("compute", "tensor", "others", "pipeline", "data", "bubble", "optimizer")
    shares = {name: getattr(found, name) / found.step for name in names}
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in shares.items() if share >= 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows, refused = rows_of(asked.file)
    if not rows:
        sys.exit(f"{asked.file}: none of its rows can be taken: {refused[:3]}")
    tokens = [predicted(row) for row in rows]
    errors = [found / row.tokens - 1 for row, found in zip(rows, tokens, strict=True)]
    sources = list(dict.fromkeys(row.source for row in rows))
    every, slopes, offset = fit(rows)
    lines, apart = [], []
    for source in sources:
        own = [row for row in rows if row.source == source]
        constants = without(rows, source, slopes, offset, every) if len(sources) > 1 else PRIOR
        others = [predicted(row, constants) / row.tokens - 1 for row in own]
        apart += others
        now, memory = (
            [error for row, error in zip(rows, errors, strict=True) if row.source == source],
            memory_errors(own),
        )
        figures = [quantile(now, 0.5), 100 * float(np.median(now)), quantile(now, 0.9)]
        figures += [quantile(others, 0.5), quantile(others, 0.9)]
        words = f"{quantile(memory, 0.5):.1f} % of {len(memory)}" if memory else "-"
        lines.append([source, str(len(own)), *(f"{figure:.1f} %" for figure in figures), words])
    note = (
        "Tokens/s of one GPU: predicted with planning/predict.py's constants, against what was printed; and "
        "with constants that were fitted to all other sources (slopes are those at the fit to all). `python -m "
        "benchmarks.plan FILE.csv --write` (the rows are not part of this repository). Worst rows and why: "
        "docs/planning.md."
    )
    header = ["source", "rows", "median error", "signed", "p90", "median, fitted without it", "p90, so", "memory"]
    lines.append(["all", str(len(rows)), *(f"{x:.1f} %" for x in (quantile(errors, 0.5),
        100 * float(np.median(errors)), quantile(errors, 0.9), quantile(apart, 0.5),
        quantile(apart, 0.9), quantile(memory_errors(rows), 0.5)))])  # fmt: skip
    if asked.write:
        write_table("plan", "Predicted and printed throughput", note, header, lines)
    else:
        print("\n".join(" | ".join(line) for line in (header, *lines)))
    print("worst rows:")
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda one: -abs(one[1]))[:12]:
        found = predict_step(row.work, row.machine, others=communication_time)
        print(f"  {row.id}: {100 * error:+.0f} %; of its step in %: {parts(found)}")
    for name, why in refused:
        print(f"not taken: {name}: {why}")
    if refused:
        print(f"not taken: {len(refused)} of {len(rows) + len(refused)} rows")
    if asked.fit:
        print(every)
    print(
        f"median error {quantile(errors, 0.5):.1f} %, p90 {quantile(errors, 0.9):.1f} %, "
        f"memory {quantile(memory_errors(rows), 0.5):.1f} %, rank {rank_of_layouts(rows, tokens):.2f} "
        f"over {len(rows)} rows"
    )


def memory_errors(rows: Sequence[Row]) -> list[float]:
    """Of the rows that print memory."""
    return [estimate_footprint(row.work).total / 2**30 / row.gib - 1 for row in rows if row.gib]


if __name__ == "__main__":
    main()
