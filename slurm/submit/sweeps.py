"""A sweep on Slurm: after the one shard stage, train and evaluate are arrays with one task for each point.

    … ─afterok─► train (array over points) ─aftercorr─► evaluate (array over the same points)

`aftercorr` ties task to task: a point is evaluated when its own training is done. Each task is the supervisor of a run
of its own (pipeline/run/points.py), requeues itself by its own id (`JOB_TASK`: the id of the array would restart all),
and leaves the others alone. `resume` submits the points that are missing, again as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.points import make_points
from slurm.query.causes import leaving
from slurm.query.states import JobState, cancel, claims, must_answer, query


def submit_sweep(
    run: Run,
    waiting: Mapping[str, str],
    fresh: Set[str],
    say: Callable[[str], None],
    refuse_failed: Callable[[Run, str], None],
) -> None:
    """Submit the points that are missing and not under way.

    `waiting`: the jobs of the stages that the points share; `fresh`: those whose jobs replace others just now, for
    which what is pending waits in vain. `refuse_failed(point, stage)` raises UserError where a stage may not be tried
    again without `resume`.
    """
    from slurm.submit.sbatch import submit

    everyone, names = make_points(run), stages.point_stages()
    own = {stage: [parent for parent in STAGES[stage].needs if parent in names] for stage in names}
    # the newest job of each, but for those that evaluate one checkpoint (slurm/supervise/evaluations.py)
    known = {(point, e["stage"]): job for point in everyone for e, job in claims(point) if "step" not in e}
    states = query(known.values())
    must_answer(states.values())
    wanted: dict[str, list[Run]] = {stage: [] for stage in names}
    going: dict[tuple[Run, str], str] = {}
    vain: list[JobState] = []
    ending: list[str] = []
    for point in everyone:
        for stage in names:
            replaced = any(point in wanted[parent] for parent in own[stage])
            state = states[known[point, stage]] if (point, stage) in known else None
            if state is not None and (state.active or state.dead):
                stale = state.state == "PENDING" and not fresh.isdisjoint(STAGES[stage].needs)
                if replaced or stale or state.dead:
                    vain.append(state)
                elif leaving(point, stage, state):
                    ending.append(state.job_id)
                else:
                    going[point, stage] = state.job_id
                    continue
            tied = any((point, parent) in going for parent in own[stage])
            if replaced or tied or stages.load(stage).missing(point) is not None:
                if not own[stage]:
                    refuse_failed(point, stage)
                wanted[stage].append(point)
    lacking = {point for found in wanted.values() for point in found}
    busy = {point for point, _ in going} - lacking
    say(f"sweep     {len(everyone)} points: {len(everyone) - len(lacking | busy)} done, {len(busy)} under way")
    cancel(vain)
    arrays: dict[str, tuple[str, list[Run]]] = {}
    for stage in names:
        array, members = arrays.get(own[stage][0], ("", [])) if own[stage] else ("", wanted[stage])
        together = [point for point in wanted[stage] if point in members]
        if together:
            after, kind = _behind([waiting[name] for name in STAGES[stage].needs if name in waiting], ending)
            words = f"over {len(together)} points"
            if array:
                after, kind = [array], "aftercorr" if len(together) > 1 else "afterok"
                words = f"over the same points, each after its {own[stage][0]}"
            job = submit(run, stage, after, kind=kind, points=together)
            say(f"{stage:9} job {job}: array {words}")
            arrays[stage] = job, together
        for point in wanted[stage]:
            if point not in together:
                after, kind = _behind([going[point, name] for name in own[stage] if (point, name) in going], ending)
                going[point, stage] = submit(run, stage, after, kind=kind, points=[point])
                say(f"{stage:9} job {going[point, stage]}: point {point.path.name}")


def _behind(parents: list[str], ending: list[str]) -> tuple[list[str], str]:
    """What to wait for, and how: what is read, else the end of the jobs that still save."""
    return (parents, "afterok") if parents else (ending, "afterany")
