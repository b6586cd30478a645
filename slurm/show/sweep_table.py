"""The table of a sweep's points, best first."""

from __future__ import annotations

from pipeline.base.files import last_object
from pipeline.evaluate.result import figure, newest_result
from pipeline.run.directory import Run
from pipeline.run.points import points


def point_table(run: Run) -> list[list[str]]:
    """The points, header first: their values, how far they are, and what they came to; the best one first.

    Empty where the run is no sweep.
    """
    sweep = run.config.sweep
    if sweep is None:
        return []
    rows = []
    for point, values in zip(points(run), sweep.points(), strict=True):
        result, last = newest_result(point), last_object(point.metrics)
        steps = f"{last['step'] if last else 0}/{point.config.train.steps}"
        loss = f"{last['loss']:.4f}" if last and last["loss"] is not None else "-"
        bits = f"{figure(result)[1]:.4f}" if result else "-"
        order = figure(result)[1] if result else float("inf")
        rows.append((order, [point.path.name, *(str(v) for v in values.values()), steps, loss, bits]))
    compared = "bits per byte" if run.config.model.target is None else "held-out loss"
    header = ["point", *sweep.points()[0], "steps", "loss", compared]
    return [header, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))]
