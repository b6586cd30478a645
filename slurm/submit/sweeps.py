"""A sweep on Slurm: after the one shard stage, train and evaluate are arrays with one task for each point.

    … ─afterok─► train (array over points) ─aftercorr─► evaluate (array over the same points)

`aftercorr` ties task to task: a point is evaluated when its own training is done. Each task is the supervisor of a run
of its own (pipeline/run/points.py), requeues itself by its own id (`JOB_TASK`: the id of the array would restart all),
and leaves the others alone. `resume` submits the points that are missing, again as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from rich.console import Console

from pipeline.base.errors import UserError
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query.causes import leaving
from slurm.query.states import Claim, JobState, cancel, claims, query


def job_of(point: Run, stage: str) -> Claim | None:
    """The job that was submitted last for a point's stage (not for one checkpoint: slurm/supervise/evaluations.py)."""
    submitted = [one for event, one in claims(point) if event["stage"] == stage and "step" not in event]
    return submitted[-1] if submitted else None


def submit_sweep(
    run: Run,
    waiting: Mapping[str, str],
    fresh: Container[str],
    console: Console,
    failed: Callable[[Run, str], str | None],
) -> None:
    """Submit the points that are missing and not under way.

    `waiting`: the jobs of the stages that the points share; `fresh`: those whose jobs replace others just now, for
    which what is pending waits in vain. `failed(point, stage)`: why a stage may not be tried again without `resume`.
    Raises UserError with that.
    """
    from slurm.submit.sbatch import submit_points

    all_points, names = points(run), stages.point_stages()
    own = {stage: [parent for parent in STAGES[stage].needs if parent in names] for stage in names}
    states = query(one for point in all_points for stage in names if (one := job_of(point, stage)))
    wanted: dict[str, list[Run]] = {stage: [] for stage in names}
    jobs: dict[tuple[Run, str], str] = {}
    vain: list[JobState] = []
    ending: list[str] = []
    done = busy = 0
    for point in all_points:
        for stage in names:
            known = job_of(point, stage)
            state = states.get(known) if known else None
            alive = state is not None and (state.active or state.dead)
            replaced = any(point in wanted[parent] for parent in own[stage])
            stale = state is not None and state.state == "PENDING" and any(n in fresh for n in STAGES[stage].needs)
            if state is not None and alive and (replaced or stale or state.dead):
                vain.append(state)
            elif state is not None and alive and leaving(point, stage, state):
                ending.append(state.job_id)
            elif state is not None and alive:
                jobs[point, stage] = state.job_id
                continue
            tied = any((point, parent) in jobs for parent in own[stage])
            if replaced or tied or stages.load(stage).missing(point) is not None:
                if not own[stage] and (reason := failed(point, stage)) is not None:
                    raise UserError(reason)
                wanted[stage].append(point)
        if not any(point in lacking for lacking in wanted.values()):
            going = any((point, stage) in jobs for stage in names)
            done, busy = done + (not going), busy + going
    console.print(f"sweep     {len(all_points)} points: {done} done, {busy} under way")
    cancel(vain)
    arrays: dict[str, tuple[str, list[Run]]] = {}
    for stage in names:
        array = arrays.get(own[stage][0]) if own[stage] else None
        together = [p for p in wanted[stage] if array is None or p in array[1]] if array or not own[stage] else []
        if together:
            after = [waiting[parent] for parent in STAGES[stage].needs if parent in waiting]
            if array is not None:
                kind = "aftercorr" if len(together) > 1 else "afterok"
                job = submit_points(run, stage, together, [array[0]], kind=kind)
                words = f"array over the same points, each after its {own[stage][0]}"
            else:
                job = submit_points(run, stage, together, after or ending, kind="afterok" if after else "afterany")
                words = f"array over {len(together)} points"
            console.print(f"{stage:9} job {job}: {words}", highlight=False)
            arrays[stage] = job, together
        for point in wanted[stage]:
            if point not in together:
                tied_to = [jobs[point, parent] for parent in own[stage] if (point, parent) in jobs]
                kind = "afterok" if tied_to else "afterany"
                jobs[point, stage] = submit_points(run, stage, [point], tied_to or ending, kind=kind)
                console.print(f"{stage:9} job {jobs[point, stage]}: point {point.path.name}", highlight=False)
