"""A sweep on Slurm: after the one shard stage, train and evaluate are arrays with one task for each point.

    … ─afterok─► train (array over points) ─aftercorr─► evaluate (array over the same points)

`aftercorr` ties task to task: a point is evaluated when its own training is done. Each task is the supervisor of a run
of its own (pipeline/sweep.py), requeues itself by its own id (`JOB_TASK`: the id of the array would restart all), and
leaves the others alone. `resume` submits the points that are missing, again as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pipeline import stages
from pipeline.errors import UserError
from pipeline.files import last_object
from pipeline.run import Run
from pipeline.stages.evaluate import figure, newest_result
from pipeline.sweep import points
from slurm.recovery import leaving
from slurm.states import Claim, JobState, cancel, claims, query


def job_of(point: Run, stage: str) -> Claim | None:
    """The job that was submitted last for a point's stage (not for one checkpoint: slurm/evaluations.py)."""
    submitted = [one for event, one in claims(point) if event["stage"] == stage and "step" not in event]
    return submitted[-1] if submitted else None


def submit_sweep(
    run: Run, after: Sequence[str], fresh: bool, console: Console, failed: Callable[[Run, str], str | None]
) -> None:
    """Submit the points that are missing and not under way, behind the jobs `after`.

    `fresh`: those replace others just now, for which what is pending waits in vain. `failed(point, stage)`: why a stage
    may not be tried again without `resume`. Raises UserError with that.
    """
    from slurm.sbatch import submit_points

    all_points = points(run)
    states = query(one for point in all_points for stage in ("train", "evaluate") if (one := job_of(point, stage)))

    vain: list[JobState] = []
    ending: list[str] = []

    def alive(point: Run, stage: str) -> JobState | None:
        known = job_of(point, stage)
        state = states.get(known) if known else None
        if state is None or not (state.active or state.dead):
            return None
        if state.dead or (fresh and state.state == "PENDING"):
            vain.append(state)
            return None
        if leaving(point, stage, state):
            ending.append(state.job_id)
            return None
        return state

    to_train, to_evaluate, count = [], [], {"done": 0, "under way": 0}
    for point in all_points:
        training = alive(point, "train")
        if stages.load("train").missing(point) is not None and training is None:
            if (reason := failed(point, "train")) is not None:
                raise UserError(reason)
            if (waiting := alive(point, "evaluate")) is not None:
                vain.append(waiting)  # it waits for a job that is replaced now
            to_train.append(point)
        elif training is None and stages.load("evaluate").missing(point) is None:
            count["done"] += 1
        elif alive(point, "evaluate") is None:
            to_evaluate.append((point, training))
        else:
            count["under way"] += 1
    console.print(f"sweep     {len(all_points)} points: {count['done']} done, {count['under way']} under way")
    cancel(vain)
    if to_train:
        array = submit_points(run, "train", to_train, after or ending, kind="afterok" if after else "afterany")
        console.print(f"train     job {array}: array over {len(to_train)} points", highlight=False)
        kind = "aftercorr" if len(to_train) > 1 else "afterok"
        array = submit_points(run, "evaluate", to_train, [array], kind=kind)
        console.print(f"evaluate  job {array}: array over the same points, each after its training", highlight=False)
    for point, training in to_evaluate:
        tied = [training.job_id] if training else ending
        job = submit_points(run, "evaluate", [point], tied, kind="afterok" if training else "afterany")
        console.print(f"evaluate  job {job}: point {point.path.name}", highlight=False)


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
