"""The table of a sweep's points, best first."""

from __future__ import annotations

from math import inf

from pipeline.evaluate.result import figure, newest_result
from pipeline.run.directory import Run
from pipeline.run.points import points
from pipeline.run.stages import load


def point_table(run: Run) -> list[list[str]]:
    """The points, header first: their values, how far they are, and what they came to; the best one first.

    Empty where the run is no sweep.
    """
    if run.config.sweep is None:
        return []
    values_of, rows = run.config.sweep.points(), []
    for point, values in zip(points(run), values_of, strict=True):
        far, result = load("train").progress(point), newest_result(point)
        found = figure(result)[1] if result else inf
        cells = [*map(str, values.values()), f"{far.done}/{far.total}", far.loss or "-"]
        rows.append((found, [point.path.name, *cells, "-" if result is None else f"{found:.4f}"]))
    compared = "bits per byte" if run.config.model.target is None else "held-out loss"
    header = ["point", *values_of[0], "steps", "loss", compared]
    return [header, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))]
